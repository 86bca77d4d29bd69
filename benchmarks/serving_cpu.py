"""Compares jaxserve with vLLM on this CPU: SmolLM2-135M under four loads.

Both servers stay up and are loaded in turn while the other one is stopped, so that other activity of the machine
affects both alike; the script compares medians over rounds. Without `--peer DIR` (a folder made by
shared/tools/peer_vllm_cpu.sh) only jaxserve is measured.

    python benchmarks/serving_cpu.py --peer /tmp/peer --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from jaxserve.cli.common.table import format_table

REPOSITORY = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class ServingLoad:
    """`requests` requests from `clients` clients; the first `shared` of the prompt tokens are equal in all of them."""

    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared: int = 0


LOADS = {
    "1": ServingLoad(clients=1, requests=2, prompt_tokens=128, output_tokens=64),
    "16": ServingLoad(clients=16, requests=32, prompt_tokens=128, output_tokens=64),
    "1 long prompt": ServingLoad(clients=1, requests=3, prompt_tokens=1000, output_tokens=4),
    "32 shared prefix": ServingLoad(clients=32, requests=64, prompt_tokens=600, output_tokens=64, shared=500),
}


@contextlib.contextmanager
def server(command: list[str], port: int, name: str) -> Iterator[tuple[int, float]]:
    """Start a server; yield its process id and the seconds until /health returned 200."""
    log = Path(tempfile.gettempdir()) / f"{name}-{port}.log"
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}; see {log}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.05)
        yield process.pid, time.monotonic() - start
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


async def one_request(port: int, model: str, prompt: list[int], output_tokens: int) -> dict[str, float]:
    """Send one request; return the seconds to the first and the last token, and the number of tokens.

    Reads the socket itself: a general HTTP client would take time from the servers on the same two cores.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    first = last = tokens = 0.0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        if b'"choices":[]' in line:
            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        else:
            last = time.perf_counter() - start
            first = first or last
    writer.close()
    return {"ttft": first, "end": last, "tokens": tokens}


async def run(port: int, model: str, load: ServingLoad, seed: int) -> dict[str, float]:
    """Run the load once, with new prompts for each seed, and return its figures."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, 49000) for _ in range(load.shared)]
    own = load.prompt_tokens - load.shared
    prompts = [[*shared, *(rng.randrange(100, 49000) for _ in range(own))] for _ in range(load.requests)]
    results: list[dict[str, float]] = []

    async def client() -> None:
        while prompts:
            results.append(await one_request(port, model, prompts.pop(), load.output_tokens))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    seconds = time.perf_counter() - start
    assert all(result["tokens"] == load.output_tokens for result in results), "a request came back short"
    return {
        "output_tok_s": sum(result["tokens"] for result in results) / seconds,
        "ttft_ms": 1e3 * statistics.median(result["ttft"] for result in results),
        "tpot_ms": 1e3 * statistics.median((r["end"] - r["ttft"]) / (r["tokens"] - 1) for r in results),
    }


def measure(
    servers: dict[str, tuple[int, int, str]], loads: dict[str, ServingLoad], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return medians over rounds by server and load; the servers take turns within a round."""
    samples: dict[str, dict[str, list[dict[str, float]]]] = {name: {load: [] for load in loads} for name in servers}
    for round_ in range(-1, rounds):
        for load_name, load in loads.items():
            for name, (pid, port, model) in servers.items():
                with paused([other for other, _, _ in servers.values() if other != pid]):
                    result = asyncio.run(run(port, model, load, seed=round_ + 1))
                if round_ < 0:
                    print(f"warmed up {name} with {load_name}", file=sys.stderr)
                    continue
                samples[name][load_name].append(result)
                print(f"round {round_} {name}, {load_name}: {result}", file=sys.stderr)
    return {
        name: {
            load_name: {key: statistics.median(r[key] for r in runs) for key in runs[0]}
            for load_name, runs in by_load.items()
        }
        for name, by_load in samples.items()
    }


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]


@contextlib.contextmanager
def paused(roots: list[int]) -> Iterator[None]:
    """Stop the servers that are not measured: one that spins while idle would slow the other."""
    pids = [pid for root in roots for pid in process_tree(root)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def processes_with_jax(root: int) -> list[str]:
    """Return the commands of a server's processes that have jax's library mapped; none if the system can't tell."""
    processes = [psutil.Process(pid) for pid in process_tree(root)]
    return [
        " ".join(process.cmdline()[1:])
        for process in processes
        if hasattr(process, "memory_maps") and any("libjax_common" in file.path for file in process.memory_maps())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="folder made by peer_vllm_cpu.sh, with vLLM's environment and model")
    parser.add_argument("--peer-script", default=str(REPOSITORY.parent / "shared/tools/peer_vllm_cpu.sh"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="append", choices=list(LOADS), help="run only this load; may be repeated")
    parser.add_argument("--port", type=int, default=8050)
    parser.add_argument("--output", default=str(REPOSITORY / "benchmarks/results/cpu/serving_cpu.json"))
    args = parser.parse_args()

    loads = {name: load for name, load in LOADS.items() if not args.load or name in args.load}
    report: dict[str, Any] = {
        "loads": {name: dataclasses.asdict(load) for name, load in loads.items()},
        "rounds": args.rounds,
        "machine_load_at_start": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as programs, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(args.port), "--program-cache-dir", programs]
        with server(command, args.port, "jaxserve") as (_, seconds):
            report["start_first_s"] = seconds
        pid, report["start_cached_s"] = stack.enter_context(server(command, args.port, "jaxserve"))
        servers = {"jaxserve": (pid, args.port, "smollm2-135m-instruct")}
        if args.peer:
            peer_port = args.port + 1
            peer = ["bash", args.peer_script, "serve", args.peer, str(peer_port)]
            peer_pid, report["start_peer_s"] = stack.enter_context(server(peer, peer_port, "vllm"))
            servers["vllm"] = (peer_pid, peer_port, "smollm2")
        report["results"] = measure(servers, loads, args.rounds)
        report["processes_with_jax"] = processes_with_jax(pid)
        metrics = httpx.get(f"http://127.0.0.1:{args.port}/metrics").text
        report["compiles_after_ready"] = [line for line in metrics.splitlines() if "compiles_after_ready" in line][-1]
    print_report(report)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


def print_report(report: dict[str, Any]) -> None:
    print(f"start to ready: first {report['start_first_s']:.1f} s, cached {report['start_cached_s']:.1f} s", end="")
    print(f", vLLM {report['start_peer_s']:.1f} s" if "start_peer_s" in report else "")
    keys = ("output_tok_s", "ttft_ms", "tpot_ms")
    rows = []
    for load in report["loads"]:
        by_server = {name: results[load] for name, results in report["results"].items()}
        rows += [[load, name, *(f"{row[key]:.1f}" for key in keys)] for name, row in by_server.items()]
        if "vllm" in by_server:
            rows.append(
                [load, "ratio", *(f"{by_server['jaxserve'][key] / by_server['vllm'][key]:.2f}" for key in keys)]
            )
    print(format_table(("load", "server", "output tok/s", "TTFT ms", "TPOT ms"), rows, left=(0, 1)))
    print(f"processes with jax: {report['processes_with_jax']}; {report['compiles_after_ready']}")


if __name__ == "__main__":
    main()
