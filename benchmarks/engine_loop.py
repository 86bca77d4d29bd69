"""What a decode step costs the host in the engine process, phase by phase: the real loop, scheduler, executor, batch
builder and ZeroMQ transport, and a device whose tokens are there at once.

"other" is what no phase covers: reading commands, sorting events by client, the step log. "dispatch" and "wait" are
what remains of them without programs to run. Milliseconds, medians over steps; "together" is of the whole step, in
which all sequences decode.

    python benchmarks/engine_loop.py --json benchmarks/results/cpu/engine_loop.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.process.main import _Server
from jaxserve.engine.process.transport import Add, ClientTransport, EngineTransport
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.observability.timeline import HOST_PHASES, Timeline
from jaxserve.runtime.execution.device_commands import DeviceCalls
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.programs.builder import UPDATE_KEY, program_keys
from jaxserve.runtime.step.buckets import decode_buckets, token_buckets
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity

PAGE, TOKEN, PROMPT = 16, 17, 32


class PhaseClock:
    """Watches a timeline: seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(HOST_PHASES, 0.0)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, dict.fromkeys(HOST_PHASES, 0.0)
        return taken


def capacity_of(slots: int, steps: int) -> Capacity:
    """An accelerator's programs, and pages enough for every sequence."""
    return Capacity(
        num_slots=slots,
        num_pages=slots * (-(-(PROMPT + steps) // PAGE) + 4),
        page_size=PAGE,
        max_model_len=8192,
        decode_buckets=decode_buckets(slots, max_fine=160, asked=None),
        token_buckets=token_buckets(2048, smallest=256),
        prompt_logprob_tokens=2 * slots,
        fine_decode_rows=160,
    )


def executor_of(capacity: Capacity, timeline: Timeline) -> DeviceExecutor:
    """The real one over programs that only hand out a token a row, which is on the host already."""
    rows = capacity.num_slots
    tokens = jax.block_until_ready(jnp.full((1, rows, 1), TOKEN, jnp.int32))
    output = StepOutput(tokens=tokens, num_tokens=None, logprobs=None, prompt_logprobs=None)  # type: ignore[arg-type]
    programs: dict[Any, Any] = {key: lambda params, state, packed: (state, output) for key in program_keys(capacity)}
    programs[UPDATE_KEY] = lambda state, packed: state
    return DeviceExecutor(DeviceCalls(None, None, programs), capacity, timeline)  # type: ignore[arg-type]


def measure(num_running: int, steps: int) -> dict[str, float]:
    """Median milliseconds by phase of the steps in which all sequences decode."""
    capacity, timeline, clock = capacity_of(num_running, steps + 2 * num_running), Timeline(), PhaseClock()
    limits = dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens", "max_num_batched_tokens"), 2048)
    scheduler = Scheduler(capacity, **limits, conservativeness=0.0)
    loop = EngineLoop(scheduler, executor_of(capacity, timeline), timeline=timeline)
    sampling = SamplingParams(max_tokens=8000, temperature=0.0)
    requests = [
        EngineRequest(request_id=f"chatcmpl-{i:032x}-0-0", prompt_ids=[i] * PROMPT, sampling=sampling, stop_ids=(2,))
        for i in range(num_running)
    ]
    times: list[dict[str, float]] = []
    lifeline, other_end = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        commands, events = f"ipc://{folder}/commands", f"ipc://{folder}/client-0"
        with ClientTransport(commands, events) as client, EngineTransport(commands, [events], lifeline) as transport:
            server = _Server(loop, transport)
            server._obey(Add(requests))
            timeline.watch(clock.span)
            while len(times) < steps:
                before = loop.stats().decode_rows
                start = time.perf_counter()
                assert transport.receive(wait=False) == []
                server._route(loop.step())
                server._publish()
                whole = time.perf_counter() - start
                phases = clock.take()
                client.receive()
                if loop.stats().decode_rows - before == num_running:
                    other = whole - sum(phases.values())
                    times.append({**phases, "other": other, "together": whole})
    os.close(lifeline)
    os.close(other_end)
    medians = {name: 1e3 * statistics.median(step[name] for step in times) for name in times[0]}
    return {"running": num_running, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--running", type=int, nargs="*", default=[16, 64, 256, 1024], help="sequences that decode")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    rows = [measure(num_running, args.steps) for num_running in args.running]
    print("  ".join(name.rjust(9) for name in rows[0]))
    for row in rows:
        print("  ".join((f"{value:9.3f}" if name != "running" else f"{value:9}") for name, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "step_ms": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
