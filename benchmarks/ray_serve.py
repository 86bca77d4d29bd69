"""Compares two replicas behind Ray Serve with two servers behind `sglang-router`, and with two servers whose clients
are split by hand.

The first table serves a real model to 16 clients: shared prefixes in random order, short streamed answers, new prompts
each round, empty caches. Each engine computes with one thread. The second table has `paced_engine` in place of the
engines, so that it shows what the ways cost: latencies, and microseconds of processor time per token in what the
requests pass first ("front": the router, or Serve's proxy), in our `ingress`, in the servers, and in Ray's others.
Forms take turns, while the others are stopped, in one order and then in the other; figures are medians over rounds.

    python -m benchmarks.ray_serve --rounds 4 --json benchmarks/results/cpu/ray_serve.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks import api_process, paced_engine, serving_cpu
from jaxserve import host
from jaxserve.bench.datasets.prompts import BenchConversation
from jaxserve.bench.datasets.synthetic import shared_prefix_groups
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.bench.load.backends import CHAT, RequestWriter
from jaxserve.bench.load.client import LoadClient
from jaxserve.bench.load.run_load import LoadResult, LoadRun
from jaxserve.bench.load.target_server import TargetServer
from jaxserve.bench.results.metrics import compute_figures
from jaxserve.cli.common.table import format_records
from jaxserve.model_source import resolve
from jaxserve.text.tokenizers.tokenizer import load_tokenizer

CLIENTS = 16
MODEL = api_process.MODEL
# Few programs; room in each cache for all prefixes.
SETTINGS = {
    "context_length": [1024], "max_running_requests": [16], "cuda_graph_bs": [8, 16], "chunked_prefill_size": [128],
}  # fmt: skip
STEPS_PER_SECOND = 30.0
# After processes were stopped, what has become due meanwhile is done first.
SETTLE = 1.0
# Stopped processes don't answer others for longer than Ray would wait.
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600", "RAY_health_check_failure_threshold": "1000"}
ROLES = {
    "ray::ProxyActor": "front", "sglang::router": "front", ":ingress": "ingress", ":engine": "servers",
    "jaxserve serve": "servers", "api_process": "servers", "paced_engine": "", "jaxserve.worker": "",
    "template_process": "",
}  # fmt: skip
"""What a process is, by a part of its command; nothing if it belongs to no way."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """`groups` prefixes of `prefix` tokens, `each` requests with one of them and a question of their own."""

    groups: int
    each: int
    prefix: int
    question: int
    output: int

    def make(self, vocabulary: Vocabulary, seed: int) -> list[BenchConversation]:
        """Create the requests in a random order."""
        return shared_prefix_groups(
            vocabulary, np.random.default_rng(seed), groups=self.groups, prompts_per_group=self.each,
            system_prompt_len=self.prefix, question_len=self.question, output_len=self.output, ordered=False,
        )  # fmt: skip


REAL, PACED = Requests(8, 6, 400, 32, 16), Requests(8, 8, 64, 16, 60)


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to the replicas: where clients send, where replicas answer for themselves, and the roots of processes."""

    ports: list[int]
    servers: list[int]
    pids: list[int]


async def send(ports: list[int], requests: list[BenchConversation]) -> LoadResult:
    """Send the requests from all clients, each of which has one of the ports."""
    runs = []
    for number, port in enumerate(ports):
        target, own = TargetServer("127.0.0.1", port), requests[number :: len(ports)]
        fields = {"temperature": 0, "ignore_eos": True}
        writer = RequestWriter(path=CHAT, host=target.authority, model=MODEL, chat=True, fields=fields)
        client = LoadClient(target.pool(), writer, timeout=120, stall=60)
        runs.append(LoadRun(client, own, [0.0] * len(own), max_concurrency=CLIENTS // len(ports)))
    results = await asyncio.gather(*(run.run(asyncio.Event()) for run in runs))
    records = [record for result in results for record in result.records]
    if failed := [record.error for record in records if record.status != "ok"]:
        sys.exit(f"{len(failed)} requests failed: {failed[0]}")
    return dataclasses.replace(results[0], records=records, duration=max(result.duration for result in results))


def counters(form: Form) -> dict[str, list[float]]:
    """Return the counters of prompt tokens and of cached ones, of each replica."""
    text = "".join(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text for port in form.servers)
    return {
        name: [float(value) for value in re.findall(rf"^jaxserve:{name}_tokens_total\S* (\S+)$", text, re.M)]
        for name in ("prompt", "cached")
    }


def cpu_seconds(form: Form) -> dict[str, float]:
    """Return the processor time so far of each role."""
    found = {"front": 0.0, "ingress": 0.0, "servers": 0.0, "others": 0.0}
    for pid in {pid for root in form.pids for pid in serving_cpu.process_tree(root)}:
        command = " ".join(psutil.Process(pid).cmdline())
        role = next((role for part, role in ROLES.items() if part in command), "others")
        if role:
            found[role] += api_process.CpuUsage.of(pid).cpu
    return found


def measure_once(form: Form, requests: list[BenchConversation]) -> dict[str, float]:
    """Return the figures of one run."""
    before, cpu_before = counters(form), cpu_seconds(form)
    figures = compute_figures(asyncio.run(send(form.ports, requests)))
    after, cpu_after = counters(form), cpu_seconds(form)
    prompt, cached = ([end - start for start, end in zip(before[name], after[name])] for name in ("prompt", "cached"))
    names = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    used = {f"{role}_us": 1e6 * (end - cpu_before[role]) for role, end in cpu_after.items()}
    return {
        "cached_percent": 100 * sum(cached) / max(sum(prompt), 1),
        "busier_percent": 100 * max(prompt) / max(sum(prompt), 1),
        "output_tok_s": figures["output_throughput"],
        **{name: figures[name] for name in names},
        **{name: value / figures["total_output_tokens"] for name, value in used.items()},
    }


@contextlib.contextmanager
def forms(port: int, engine: str) -> Iterator[dict[str, Form]]:
    """Start the servers of all forms."""
    os.environ["NPROC"] = "1"
    serve = ["benchmarks.api_process", "--serve"]
    if engine == "real":
        flags = [(f"--{name.replace('_', '-')}", *map(str, value)) for name, value in SETTINGS.items()]
        serve = ["jaxserve", "serve", *itertools.chain(*flags), "--port"]
    two, router, ingress = [port, port + 1], port + 2, port + 3
    urls = [f"http://127.0.0.1:{own}" for own in two]
    with contextlib.ExitStack() as stack:

        def start(name: str, port: int, *command: str) -> int:
            started = serving_cpu.server([sys.executable, "-m", *command], port, name)
            return stack.enter_context(started)[0]

        pids = [start("jaxserve", own, *serve, str(own)) for own in two]
        router_pid = start(
            "sglang-router", router, "sglang_router", "launch", "--host", "127.0.0.1", "--port", str(router),
            "--policy", "cache_aware", "--prometheus-port", str(port + 4), "--worker-urls", *urls,
        )  # fmt: skip
        ray_pid = start("ray", ingress, "benchmarks.ray_serve", "--port", str(ingress), "--cluster", engine)
        cluster = Form([ingress], [ingress], [ray_pid])
        while len(counters(cluster)["prompt"]) < len(two):
            time.sleep(0.1)
        yield {
            "by hand": Form(two, two, pids),
            "sglang-router": Form([router], two, [*pids, router_pid]),
            "ray serve": cluster,
        }


def measure(port: int, rounds: int, engine: str, requests: Requests) -> list[dict[str, Any]]:
    """Return medians over rounds by form, with the rounds."""
    vocabulary = Vocabulary(load_tokenizer(resolve(MODEL)), chat=True)
    with forms(port, engine) as found:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in found}
        for round_ in range(-1, rounds):  # the first round warms up
            for name in list(found)[:: -1 if round_ % 2 else 1]:
                running = set(found[name].pids)
                with serving_cpu.paused(sorted({pid for form in found.values() for pid in form.pids} - running)):
                    time.sleep(SETTLE)
                    for own in found[name].servers if engine == "real" else ():
                        httpx.post(f"http://127.0.0.1:{own}/flush_cache", timeout=30).raise_for_status()
                    made = requests.make(vocabulary, round_ + 1)
                    result = measure_once(found[name], made[:CLIENTS] if round_ < 0 else made)
                print(f"{engine}, round {round_}, {name}: {result}", file=sys.stderr)
                if round_ >= 0:
                    results[name].append(result)
    return [
        {"form": name, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}, "rounds": runs}
        for name, runs in results.items()
    ]


def run_cluster(port: int, engine: str) -> None:
    """Run a cluster of one node with the application until told to stop."""
    os.environ |= PATIENCE
    import ray
    from ray import serve

    from jaxserve.ray.application import application
    from jaxserve.ray.profile import load_profile

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    settings = {name: value if len(value) > 1 else value[0] for name, value in SETTINGS.items()}
    paced: dict[str, Any] = {"load": api_process.load_tokenizer_only, "engine_module": "benchmarks.paced_engine"}
    built = application(load_profile(None, settings), replicas=2, **(paced if engine == "paced" else {}))
    serve.run(built, name="llm", route_prefix="/")
    signal.pause()


COLUMNS = {
    "real": ("form", "cached_percent", "busier_percent", "median_ttft_ms", "p99_ttft_ms", "output_tok_s"),
    "paced": ("form", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "output_tok_s", "front_us",
              "ingress_us", "servers_us", "others_us"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--port", type=int, default=8080, help="the first of ten")
    parser.add_argument("--only", choices=list(COLUMNS), help="one of the tables")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cluster", choices=list(COLUMNS), help="run the cluster; used by this script itself")
    args = parser.parse_args()
    if args.cluster:
        run_cluster(args.port, args.cluster)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the servers end too
    report: dict[str, Any] = {"machine": f"{host.num_cores()} cores, load {os.getloadavg()[0]:.1f} at the start"}
    with tempfile.TemporaryDirectory() as folder:
        ids = api_process.token_ids(load_tokenizer(resolve(MODEL)))
        settings = {"steps_per_second": STEPS_PER_SECOND, "token_ids": ids}
        (Path(folder) / "settings.json").write_text(json.dumps(settings))
        os.environ[paced_engine.FOLDER] = folder
        for number, (engine, requests) in enumerate({"real": REAL, "paced": PACED}.items()):
            if args.only in (None, engine):
                rows = measure(args.port + 5 * number, args.rounds, engine, requests)
                report[engine] = {**dataclasses.asdict(requests), "forms": rows}
                print(f"{engine}: {requests}\n{format_records(rows, COLUMNS[engine], decimals=1)}\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
