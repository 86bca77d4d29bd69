"""Measures the host time of a decode step in the engine process by phase, without a device.

It runs the real loop, scheduler, executor, batch builder and ZeroMQ transport over programs that return their tokens
immediately. "other" is the time outside all phases: reading commands, sorting events by client, the step log.
"dispatch" and "wait" lack the programs themselves. Figures are medians in milliseconds over the steps in which all
sequences decode; "together" is the whole step.

    python -m benchmarks.engine_loop --json benchmarks/results/cpu/engine_loop.json
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

from benchmarks.scheduler import PAGE, TOKEN, capacity_of, scheduler_of
from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.cli.common.table import format_records
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.process.main import _CommandServer
from jaxserve.engine.process.transport import Add, ClientTransport, EngineTransport
from jaxserve.observability.timeline import HOST_PHASES, Timeline
from jaxserve.runtime.execution.device_commands import LocalCommands
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.programs.table import step_keys
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity

PROMPT = 32


class PhaseClock:
    """Sums the seconds of a timeline's phases since the last `take`."""

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


def executor_of(capacity: Capacity, timeline: Timeline) -> DeviceExecutor:
    """Return a real executor over programs that only return one token per row, which is on the host already."""
    rows = capacity.num_slots
    tokens = jax.block_until_ready(jnp.full((1, rows, 1), TOKEN, jnp.int32))
    output = StepOutput(tokens, tokens, logprobs=None, prompt_logprobs=None, expert_tokens=None)
    programs: dict[Any, Any] = {key: lambda params, state, packed: (state, output) for key in step_keys(capacity)}
    programs[UPDATE_KEY] = lambda params, state, packed: (state, ())
    return DeviceExecutor(LocalCommands(None, None, programs), capacity, timeline)  # type: ignore[arg-type]


def measure(num_running: int, steps: int) -> dict[str, float]:
    """Return median milliseconds by phase of the steps in which all sequences decode."""
    timeline, clock = Timeline(), PhaseClock()
    capacity = capacity_of(num_running, num_running * (PROMPT + steps + 2 * num_running + 5 * PAGE))
    scheduler = scheduler_of(capacity, conservativeness=0.0)
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
            server = _CommandServer(loop, transport)
            server._execute(Add(requests))
            timeline.watch(clock.span)
            while len(times) < steps:
                before = loop.stats().decode_rows
                start = time.perf_counter()
                assert transport.receive(wait=False) == []
                server._route(loop.step())
                server._send_step()
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
    parser.add_argument("--running", type=int, nargs="*", default=[16, 64, 256, 1024], help="decoding sequences")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    rows = [measure(num_running, args.steps) for num_running in args.running]
    print(format_records(rows))
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "step_ms": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
