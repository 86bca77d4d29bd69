"""Measures the cost of a mesh and the effect of placement, on the CPU.

"broadcasts" sends the input of a decode step to a follower in another process: `send` is the time of the scheduling
thread, `round_trip` the time until the follower has decoded the input and answered. "steps" compares medians of a
decode step of 16 requests by mesh shape on simulated devices: a ratio of 2 means twice as long as on one device. The
devices share this machine's cores, so it shows what the mesh adds, not what more devices would save. "placements"
replays the traces of `benchmarks/scheduler.py` over four data-parallel ranks with a simulated device: our placement
with several weights of a sequence and of a cached token, and placements that use one criterion only.

    python -m benchmarks.mesh --json benchmarks/results/cpu/mesh.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.scheduler import simulate
from jaxserve import host
from jaxserve.cli.common.table import format_records
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.engine.scheduling import rank_router
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request

if TYPE_CHECKING:
    from jaxserve.runtime.step.program import ProgramKey

SHAPES = ["1x1", "1x2", "1x4", "1x8", "2x1", "2x2", "2x4", "4x1", "4x2", "8x1"]
ROWS, STEPS, ROUNDS = 16, 150, 4
RANKS = 4
SEQUENCES, BROADCASTS = (1, 32, 256, 1024), 2000
PARTS = ("broadcasts", "steps", "placements")
TRACES = ("shared-prefix", "multi-turn", "uniform", "long-context", "full-length")
MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip


def time_step(shape: str, model: str) -> dict[str, Any]:
    """Return the median milliseconds of a step of one shape, and of putting its input on the devices."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxserve.api_types import EngineRequest, SamplingParams
    from jaxserve.layers.axes import DATA_AXIS
    from jaxserve.runtime.devices.mesh import make_mesh
    from jaxserve.worker import build_engine

    data, tensor = map(int, shape.split("x"))
    loop, _ = build_engine(
        EngineConfig(
            model=model,
            load_format="dummy",
            dtype="float32",
            device="cpu",
            dp_size=data,
            tp_size=tensor,
            max_running_requests=ROWS // data,
            cuda_graph_bs=(ROWS // data,),
            max_total_tokens=512 * ROWS // data,
            chunked_prefill_size=64,
            disable_overlap_schedule=True,
            log_level="error",
        )
    )
    for i in range(ROWS):
        sampling = SamplingParams(max_tokens=STEPS + 20, temperature=0.0)
        loop.add(EngineRequest(request_id=f"r{i}", prompt_ids=[i] * 8, sampling=sampling))
    times = []
    while loop.has_work:
        start = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - start)
    where = NamedSharding(make_mesh(jax.devices(), data=data, tensor=tensor), PartitionSpec(DATA_AXIS))
    put = []
    for _ in range(STEPS):
        packed = np.zeros((data, 4 * ROWS // data), np.int32)
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(packed, where))
        put.append(time.perf_counter() - start)
    return {"step_ms": 1e3 * statistics.median(times[15:STEPS]), "input_ms": 1e3 * statistics.median(put)}


def steps_by_shape(shapes: Sequence[str]) -> list[dict[str, Any]]:
    """Time each shape in its own process with as many simulated devices; keep the best of several rounds, because the
    machine is shared."""
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for shape in [*shapes] * ROUNDS:
            count = int(shape[0]) * int(shape[2])
            flags = f"--xla_force_host_platform_device_count={count}"
            env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
            command = [sys.executable, "-m", "benchmarks.mesh", "--shape", shape, "--model", folder]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            before = best.setdefault(shape, found)
            best[shape] = {name: min(value, before[name]) for name, value in found.items()}
    base = best[shapes[0]] if shapes else {}
    return [
        {
            "data x tensor": shape,
            **found,
            "step_ratio": found["step_ms"] / base["step_ms"],
            "input_ratio": found["input_ms"] / base["input_ms"],
        }
        for shape, found in best.items()
    ]


def in_turn(request: Request, ranks: Sequence[Rank], pending: Sequence[int]) -> list[Rank]:
    """Choose one rank after the other, by arrival."""
    return sorted(ranks, key=lambda rank: (rank.index - request.arrival) % RANKS)


def by_load(request: Request, ranks: Sequence[Rank], pending: Sequence[int]) -> list[Rank]:
    """Prefer the rank with the fewest running sequences."""
    return sorted(ranks, key=lambda rank: len(rank.prefilling) + len(rank.decoding))


def by_prefix(request: Request, ranks: Sequence[Rank], pending: Sequence[int]) -> list[Rank]:
    """Prefer the rank with the longest cached prefix; the first rank if there is none."""
    fill, limit = request.fill_tokens, request.num_reusable_tokens
    return sorted(ranks, key=lambda rank: -rank.cache.match_length(request.namespace, fill, limit))


def placements(count: int, traces: Sequence[str]) -> list[dict[str, Any]]:
    """Simulate every placement on every trace."""
    rows = []
    for trace in traces:
        for name, function in (("in turn", in_turn), ("load", by_load), ("prefix", by_prefix)):
            with mock.patch("jaxserve.engine.scheduling.prefill.rank_by_cost", function):
                rows.append({"placement": name, **simulate(trace, count, RANKS, policy="fcfs")})
        for weight in (0, 16, rank_router.SEQUENCE_TOKENS, 256):
            with mock.patch.object(rank_router, "SEQUENCE_TOKENS", weight):
                rows.append({"placement": f"cost, {weight} a sequence", **simulate(trace, count, RANKS, policy="fcfs")})
        for weight in (0, 1, 2, 8):
            with mock.patch.object(rank_router, "CACHED_WEIGHT", weight):
                rows.append({"placement": f"cost, cached x {weight}", **simulate(trace, count, RANKS, policy="fcfs")})
    return rows


def _meet(node_rank: int, address: str) -> ProcessGroup:
    config = EngineConfig(tp_size=2, nnodes=2, node_rank=node_rank, dist_init_addr=address)
    return ProcessGroup.connect(config, lambda reason: print(reason, file=sys.stderr))


def follow(address: str) -> None:
    """Run the other end of `broadcasts`: answer each command with the size of its input."""
    from jaxserve.runtime.execution.device_commands import FollowerExecutor, LocalCommands

    nodes = _meet(1, address)
    key: ProgramKey = _decode_key(0)
    calls = LocalCommands(None, None, {key: lambda params, state, packed: (packed.size, None)})  # type: ignore[arg-type]
    follower = FollowerExecutor(calls, {key: None}, 1, print)
    while True:
        follower.execute(nodes.next_command())
        nodes.agree(calls._state, max)


def _decode_key(size: int) -> ProgramKey:
    from jaxserve.runtime.step.program import ProgramKey

    return ProgramKey("decode", size, True)


def broadcasts(counts: Sequence[int]) -> list[dict[str, Any]]:
    """Measure broadcasts to a follower in another process; return a row for each number of sequences."""
    from jaxserve.runtime.execution.device_commands import BroadcastCommands, LocalCommands
    from jaxserve.runtime.step import batch
    from jaxserve.step_plan import Capacity, Chunk, StepPlan

    address = f"127.0.0.1:{host.free_port()}"
    follower = subprocess.Popen([sys.executable, "-m", "benchmarks.mesh", "--follow", address])
    nodes = _meet(0, address)
    rows = []
    for count in counts:
        capacity = Capacity(
            num_slots=count, num_pages=64 * count, page_size=16, max_model_len=1024, decode_buckets=(count,),
            token_buckets=(count,), prompt_logprob_tokens=count,
        )  # fmt: skip
        chunks = [
            Chunk(request_id=str(i), slot=i, rank=0, start=16, length=1, tokens=None, new_pages=((i,),), logits=1,
                  sample=True)
            for i in range(count)
        ]  # fmt: skip
        plan = StepPlan(opens=[], chunks=chunks, num_decodes=count, greedy=True)
        packed = batch.pack_step(plan, batch.step_shape(_decode_key(count), capacity), capacity)
        key = _decode_key(0)
        nothing = LocalCommands(None, None, {key: lambda params, state, packed: (None, None)})  # type: ignore[arg-type]
        leading = BroadcastCommands(nothing, nodes.broadcast)
        send, trip = [], []
        for _ in range(BROADCASTS):
            start = time.perf_counter()
            leading.run(key, packed)
            send.append(time.perf_counter() - start)
            assert nodes.agree(0, max) == packed.size
            trip.append(time.perf_counter() - start)
        rows.append({
            "sequences": count, "bytes": packed.nbytes, "send_ms": 1e3 * statistics.median(send),
            "send_p99_ms": 1e3 * statistics.quantiles(send, n=100)[-1], "round_trip_ms": 1e3 * statistics.median(trip),
        })  # fmt: skip
    nodes.leave("the benchmark is over")
    follower.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=4000, help="requests of each run over a trace")
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--shapes", nargs="*", default=SHAPES, choices=SHAPES)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS), help="others stay in --json")
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    if args.shape:
        print(json.dumps(time_step(args.shape, args.model)))
        return
    if args.follow:
        follow(args.follow)
    report: dict[str, Any] = {"requests": args.requests, "rows": ROWS, "ranks": RANKS}
    if args.json and args.json.exists() and set(args.parts) < set(PARTS):
        report = json.loads(args.json.read_text())
    if "broadcasts" in args.parts:
        report["broadcasts"] = broadcasts(SEQUENCES)
        print(format_records(report["broadcasts"]), end="\n\n")
    if "steps" in args.parts and args.shapes:
        report["steps"] = steps_by_shape(args.shapes)
        print(format_records(report["steps"]), end="\n\n")
    if "placements" in args.parts:
        report["placements"] = placements(args.requests, args.traces)
        columns = ["trace", "placement", "simulated_s", "output_tok_s", "hit_rate", "decode_padding", "mixed_padding",
                   "retractions", "queue_s_median", "queue_s_p99"]  # fmt: skip
        print(format_records(report["placements"], columns))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
