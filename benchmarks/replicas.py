"""Measures the placement of `--dp-mode replicas`, and compares it with data parallelism in a mesh.

The first table replays traces over four replicas with simulated devices (`benchmarks/scheduler.py`), each with its own
clock: our placement with several weights of a cached token, placements that use one criterion only, and four ranks of a
mesh in lock step. `balance` is the most tokens computed by one replica, divided by the mean. The second table loads
real servers on this machine in turn: one engine, two ranks of a mesh, two replicas, and two replicas that each use all
threads. Their model has the shapes of SmolLM2-135M, dummy weights, and `--layers` layers.

    python -m benchmarks.replicas --json benchmarks/results/cpu/replicas.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from benchmarks import scheduler, serving_cpu
from benchmarks.scheduler import POOL, Arrival, answer, capacity_of, request_of, scheduler_of, step_seconds
from jaxserve import host
from jaxserve.api_types import TokenEvent
from jaxserve.cli.common.table import format_records
from jaxserve.engine.client import replica_router
from jaxserve.engine.client.replica_router import ReplicaRouter
from jaxserve.step_plan import StepPlan, StepResult
from tests.tiny_model import write_tiny_model

REPLICAS, SLOTS = 4, 256
TRACES = ("shared-prefix", "multi-turn", "samples", "one-prefix", "uniform", "long-context", "full-length")
# A small chunk keeps the number of programs low.
SERVE = ["--load-format", "dummy", "--device", "cpu", "--context-length", "1024", "--chunked-prefill-size", "64"]
ONE = ["--dp-size", "1", "--max-running-requests", "32", "--cuda-graph-bs", "32"]
TWO = ["--dp-size", "2", "--max-running-requests", "16", "--cuda-graph-bs", "16", "--dp-mode"]
FORMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "one engine": (ONE, {}),
    "mesh": ([*TWO, "mesh"], {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}),
    "replicas": ([*TWO, "replicas"], {}),
    "replicas, all threads each": ([*TWO, "replicas"], {"NPROC": str(2 * host.num_cores())}),
}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip
LOADS = ("16", "32 shared prefix")


def samples(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield prompts of 400 tokens that share nothing, eight requests for each."""
    for i in range(count // 8):
        prompt = rng.choices(range(100, 30_000), k=400)
        for _ in range(8):
            yield Arrival(i * 0.08, prompt, 128, rng.randint(32, 128))


def one_prefix(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield 64 unique tokens after the same 1,024 tokens, with long answers."""
    prefix = rng.choices(range(100, 30_000), k=1024)
    for i in range(count):
        outputs = rng.randint(64, 256)
        yield Arrival(i * 0.012, prefix + rng.choices(range(100, 30_000), k=64), outputs, outputs)


class InTurn(ReplicaRouter):
    """Chooses one replica after the other."""

    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        self._turns = itertools.cycle(range(REPLICAS))

    def _best(self, cached: Sequence[int]) -> int:
        return next(self._turns)


class ByLoad(ReplicaRouter):
    """Chooses the replica with the fewest open requests."""

    def _best(self, cached: Sequence[int]) -> int:
        return min(range(REPLICAS), key=lambda replica: self._loads[replica].num_open)


class ByPrefix(ReplicaRouter):
    """Chooses the replica with the longest cached prefix; with equal ones, the fewest open requests."""

    def _best(self, cached: Sequence[int]) -> int:
        return min(range(REPLICAS), key=lambda replica: (-cached[replica], self._loads[replica].num_open))


class Replica:
    """A scheduler and its simulated device, with a clock of its own."""

    def __init__(self, watch: Callable[[TokenEvent], None]) -> None:
        capacity = capacity_of(SLOTS // REPLICAS, POOL // REPLICAS)
        self.now = 0.0
        self.scheduler = scheduler_of(capacity, policy="fcfs", clock=lambda: self.now)
        self.left: dict[str, int] = {}
        self.first_at: dict[str, float] = {}
        self._watch = watch
        self._in_flight: list[tuple[StepPlan, StepResult]] = []

    def advance(self, until: float) -> None:
        """Step until that time, or until there is no work left."""
        while self.now < until and (self.scheduler.has_work or self._in_flight):
            plan = self.scheduler.plan()
            if plan is not None:
                self._in_flight.append((plan, answer(plan, self.left)))
                self.now += step_seconds(plan, 0)
            if plan is None or len(self._in_flight) > 1:
                for event in self.scheduler.commit(*self._in_flight.pop(0)):
                    self._report(event)
        if not self.scheduler.has_work:
            self.now = max(self.now, until if until != float("inf") else 0.0)

    def _report(self, event: TokenEvent) -> None:
        if event.queue_seconds is not None:
            self.first_at[event.request_id] = self.now
        if event.queue_seconds is not None or event.finish_reason is not None:
            self._watch(event)


def simulate(trace: str, count: int, kind: type[ReplicaRouter]) -> dict[str, Any]:
    """Run a trace over the replicas to its end, in simulated time."""
    capacity = capacity_of(SLOTS // REPLICAS, POOL // REPLICAS)
    placed = kind(REPLICAS, num_slots=capacity.num_slots, num_pages=capacity.num_pages, page_size=capacity.page_size)
    replicas = [Replica(placed.observe) for _ in range(REPLICAS)]
    arrived: dict[str, float] = {}
    for number, arrival in enumerate(scheduler.TRACES[trace](random.Random(0), count)):
        for replica in replicas:
            replica.advance(arrival.at)
        request = request_of(number, arrival.prompt, arrival.max_tokens)
        chosen = replicas[placed.place(request)]
        chosen.left[request.request_id] = arrival.outputs
        arrived[request.request_id] = arrival.at
        assert chosen.scheduler.add(request) is None
    for replica in replicas:
        replica.advance(float("inf"))
        assert replica.scheduler.check_integrity() == []
    stats = [replica.scheduler.stats() for replica in replicas]
    waits = [at - arrived[name] for replica in replicas for name, at in replica.first_at.items()]
    assert len(waits) == len(arrived)
    assert placed.num_open == 0
    computed = [one.cache_query_tokens - one.cache_hit_tokens + one.generation_tokens for one in stats]
    seconds = max(replica.now for replica in replicas)
    return {
        "trace": trace,
        "simulated_s": seconds,
        "output_tok_s": sum(one.generation_tokens for one in stats) / seconds,
        "hit_rate": sum(one.cache_hit_tokens for one in stats) / sum(one.cache_query_tokens for one in stats),
        "balance": max(computed) / statistics.fmean(computed),
        "retractions": sum(one.num_preemptions for one in stats),
        "ttft_s_median": statistics.median(waits),
        "ttft_s_p99": statistics.quantiles(waits, n=100)[98],
    }


def placements(count: int, traces: Sequence[str]) -> list[dict[str, Any]]:
    """Simulate every placement on every trace, and the mesh in lock step."""
    rows = []
    scheduler.TRACES |= {"samples": samples, "one-prefix": one_prefix}
    for trace in traces:
        for name, kind in (("in turn", InTurn), ("load", ByLoad), ("prefix", ByPrefix)):
            rows.append({"placement": name, **simulate(trace, count, kind)})
        for weight in (0, 1, 2, 4, 8):
            with mock.patch.object(replica_router, "CACHED_WEIGHT", weight):
                rows.append({"placement": f"cost, cached x {weight}", **simulate(trace, count, ReplicaRouter)})
        mesh = scheduler.simulate(trace, count // 8 * 8, REPLICAS, policy="fcfs")
        names = ("trace", "simulated_s", "output_tok_s", "hit_rate", "retractions")
        rows.append({"placement": "mesh, in lock step", **{name: mesh[name] for name in names}})
    return rows


def forms(layers: int, rounds: int, port: int) -> dict[str, Any]:
    """Measure output tokens per second of real servers of each form, loaded in turn while the others are stopped."""
    servers, starts = {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = str(write_tiny_model(Path(folder)))  # only for its tokenizer: prompts are ids
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
        for number, (name, (flags, environment)) in enumerate(FORMS.items()):
            command = ["env", *(f"{key}={value}" for key, value in environment.items())]
            command += [sys.executable, "-m", "jaxserve", "serve", model, "--port", str(port + number), *SERVE]
            pid, starts[name] = stack.enter_context(serving_cpu.server([*command, *flags], port + number, "jaxserve"))
            servers[name] = (pid, port + number, model)
        results: dict[str, Any] = {name: {load: {"rounds": []} for load in LOADS} for name in servers}
        for round_ in range(-1, rounds):  # the first round warms up
            for load, (name, (pid, own, _)) in itertools.product(LOADS, servers.items()):
                with serving_cpu.paused([other for other, _, _ in servers.values() if other != pid]):
                    found = asyncio.run(serving_cpu.run(own, model, serving_cpu.LOADS[load], seed=round_ + 1))
                if round_ >= 0:
                    results[name][load]["rounds"].append(found["output_tok_s"])
        for name, (_, own, _) in servers.items():
            for load in LOADS:
                results[name][load]["output_tok_s"] = statistics.median(results[name][load]["rounds"])
            info = httpx.get(f"http://127.0.0.1:{own}/server_info", timeout=30).json()
            results[name]["in all"] = {
                "hit_rate": info["stats"]["cache_hit_tokens"] / info["stats"]["cache_query_tokens"],
                "output_tokens_by_process": [one["stats"]["generation_tokens"] for one in info["replicas"]],
            }
    return {"layers": layers, "start_s": starts, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=4000, help="requests of each run over a trace")
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--rounds", type=int, default=5, help="rounds on real servers; 0 skips them")
    parser.add_argument("--layers", type=int, default=30, help="layers of the real servers' model")
    parser.add_argument("--port", type=int, default=8060)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    report: dict[str, Any] = {"requests": args.requests, "replicas": REPLICAS}
    report["placements"] = placements(args.requests, args.traces)
    print(format_records(report["placements"]))
    if args.rounds:
        report["machine"] = f"{host.num_cores()} cores, load {os.getloadavg()[0]:.1f} at the start"
        report["forms"] = forms(args.layers, args.rounds, args.port)
        rows = [
            {
                "load": load,
                "form": name,
                "output_tok_s": results[load]["output_tok_s"],
                "least": min(results[load]["rounds"]),
                "most": max(results[load]["rounds"]),
            }
            for load in LOADS
            for name, results in report["forms"]["results"].items()
        ]
        print(f"\n{format_records(rows)}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
