"""Measures how long pipeline stages wait, with the real loop, scheduler, executor and commands over devices that only
take their time.

Each stage has a device, a thread that runs what it is given in order, as a device does. A program of a step sleeps for
the time that is set for the stage, a mixed one longer by its tokens; a transfer is done once both devices have come to
it. After a warm-up, each stage is timed from the start of its first step to the end of its last one: "idle_i" is the
time in which stage i ran none, per step, as a share of the slowest stage's time for a step. A stage that is faster by
itself is idle for the difference; "waits" is the most that a stage is idle beyond that. "in_flight" counts steps that
were dispatched and not fetched, right after a dispatch: the last of them is planned while the others compute. "busy" is
how many stages compute at a time, and "clocks" the same by `StageClock`. Unless it is "divided", all requests are in
one micro-batch.

    python -m benchmarks.pipeline --json benchmarks/results/cpu/pipeline.json
"""

from __future__ import annotations

import argparse
import json
import logging
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.scheduler import capacity_of, request_of
from jaxserve.api_types import StageTimes
from jaxserve.cli.common.table import format_records
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.execution.stage_clock import StageClock
from jaxserve.runtime.execution.staged_commands import StagedCommands
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.programs.transfers import FEEDBACK_KEY
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity, StepPlan, StepResult

PROMPT, CHUNK = 512, 128
TOKEN = 7
TOKEN_SECONDS = 1e-5


class Later:
    """An array that a device computes later; the host reads tokens of it."""

    def __init__(self, rows: int) -> None:
        self._there = threading.Event()
        self._rows = rows

    def arrive(self) -> None:
        self._there.set()

    def is_ready(self) -> bool:
        return self._there.is_set()

    def block_until_ready(self) -> Later:
        self._there.wait()
        return self

    def copy_to_host_async(self) -> None: ...

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._there.wait()
        return np.full((1, self._rows, 1), TOKEN)


class PacedStage:
    """A stage that takes `seconds` for a step. `times` are the start and the end of each step so far."""

    def __init__(self, seconds: float, *, is_last: bool, rows: int) -> None:
        self.times: list[tuple[float, float]] = []
        self._seconds = seconds
        self._is_last = is_last
        self._rows = rows
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, key: ProgramKey, packed: np.ndarray, *given: Any) -> Any:
        """Start a program."""
        if not KINDS[key.kind].is_step:
            return ()
        output = Later(self._rows)
        prompt = TOKEN_SECONDS * key.size if key.kind == "mixed" else 0.0
        self.put(lambda: self._compute(self._seconds + prompt, output))
        if not self._is_last:
            return output
        return StepOutput(output, output, None, None, None, output)  # type: ignore[arg-type]

    def put(self, work: Callable[[], None] | None) -> None:
        """Have the device do something after what it has to do; None ends it."""
        self._work.put(work)

    def store_arrived(self) -> None: ...

    def close(self) -> None:
        """Wait until the device is done."""
        self.put(None)
        self._thread.join()

    def _compute(self, seconds: float, output: Later) -> None:
        start = time.perf_counter()
        while (left := start + seconds - time.perf_counter()) > 0:
            time.sleep(left)
        self.times.append((start, time.perf_counter()))
        output.arrive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class PacedTransfer:
    """A transfer between the devices of two stages, which both wait for each other."""

    def __init__(self, source: PacedStage, target: PacedStage) -> None:
        self.fields = {FEEDBACK_KEY: ("feedback",)}
        self._devices = source, target

    def send(self, key: ProgramKey, sent: Any) -> Any:
        """Start the transfer of one array, and return what arrives."""
        met, arrived = threading.Barrier(2), Later(0)

        def meet() -> None:
            met.wait()
            arrived.arrive()

        for device in self._devices:
            device.put(meet)
        return {"feedback": arrived} if key == FEEDBACK_KEY else arrived


class CountingExecutor(DeviceExecutor):
    """The real executor. `in_flight` has how many steps were not fetched when each was dispatched, itself included."""

    def __init__(self, commands: StagedCommands, capacity: Capacity) -> None:
        super().__init__(commands, capacity)
        self.plans: list[StepPlan] = []
        self.in_flight: list[int] = []
        self._num_collected = 0

    def dispatch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        self.in_flight.append(len(self.plans) - self._num_collected)
        return super().dispatch(plan)

    def collect(self, handle: object) -> StepResult:
        self._num_collected += 1
        return super().collect(handle)


def measure(
    name: str, paces_ms: Sequence[float], requests: int, steps: int, *, every: int = 0, divided: bool = True
) -> dict[str, object]:
    """Return the figures of `steps` steps while `requests` requests decode.

    If `every` isn't 0, a prompt arrives once in `every` steps; its request ends with its first token.
    """
    capacity = capacity_of(requests + 8, (requests + 8) * (PROMPT + 4 * steps))
    capacity = msgspec.structs.replace(capacity, num_stages=len(paces_ms))
    scheduler = Scheduler(
        capacity if divided else msgspec.structs.replace(capacity, num_stages=1),
        chunked_prefill_size=CHUNK,
        max_prefill_tokens=CHUNK,
        max_num_batched_tokens=2048,
        conservativeness=0.0,
        prefix_cache=False,
    )
    last = len(paces_ms) - 1
    stages = [PacedStage(pace / 1000, is_last=i == last, rows=capacity.num_slots) for i, pace in enumerate(paces_ms)]
    transfers = [PacedTransfer(*pair) for pair in zip(stages, [*stages[1:], stages[0]])]
    clocks = [StageClock(i, logging.error) for i in range(len(stages))]
    commands = StagedCommands(capacity, stages, transfers, clocks, None)  # type: ignore[arg-type]
    executor = CountingExecutor(commands, capacity)
    loop = EngineLoop(scheduler, executor)
    for number in range(requests):
        loop.add(request_of(number, [number + 1] * 32, 8000))
    warm_up = 16 * len(paces_ms)
    number = requests
    before = executor.stage_times()
    while len(executor.plans) < warm_up + steps:
        if every and len(executor.plans) >= (number - requests) * every:
            loop.add(request_of(number, [number + 1] * PROMPT, 1))
            number += 1
        loop.step()
        if len(executor.plans) <= warm_up:
            before = executor.stage_times()
    after = executor.stage_times()
    loop.flush()
    for stage in stages:
        stage.close()
    busy, idle = [], []
    for stage in stages:
        times = stage.times[warm_up:]
        busy.append(sum(end - start for start, end in times) / len(times))
        idle.append((times[-1][1] - times[0][0]) / len(times) - busy[-1])
    slowest = max(busy)
    waits = [one - (slowest - own) for one, own in zip(idle, busy)]
    plans = executor.plans[warm_up:]
    shares = [StageTimes(two.compute_seconds - one.compute_seconds, two.wait_seconds - one.wait_seconds).busy
              for one, two in zip(before, after)]  # fmt: skip
    return {
        "case": name,
        "divided": divided,
        "requests": requests,
        "pace_ms": "/".join(f"{pace:g}" for pace in paces_ms),
        "step_ms": 1e3 * slowest,
        "in_flight": statistics.median(executor.in_flight[warm_up:]),
        "busy": sum(busy) / (slowest + max(waits)),
        "clocks": sum(shares),
        **{f"idle_{stage}": one / slowest for stage, one in enumerate(idle)},
        "waits": max(waits) / slowest,
        "with_prompts": sum(len(plan.chunks) > plan.num_decodes for plan in plans) / len(plans),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pace", type=float, default=20.0, help="milliseconds of a stage for a step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("jaxserve").setLevel(logging.ERROR)
    pace, steps = args.pace, args.steps
    even, uneven = [pace] * 4, [pace, pace, 1.3 * pace, pace]
    rows = [
        measure("decode", even, 64, steps),
        measure("decode", even, 64, steps, divided=False),
        measure("decode", [pace] * 2, 64, steps),
        measure("decode", even, 5, steps),
        measure("alone", even, 1, steps // 4),
        measure("uneven", uneven, 64, steps),
        measure("prompts", even, 64, steps, every=4),
        measure("some prompts", even, 64, steps, every=12),
    ]
    print(format_records(rows))
    if args.json:
        args.json.write_text(json.dumps({"steps": steps, "pipeline": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
