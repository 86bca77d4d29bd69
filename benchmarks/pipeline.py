"""Measures how long pipeline stages wait, with the real loop and scheduler over stages that only take their time.

Each stage is a thread that runs the steps one after the other. A step sleeps for the time that is set for the stage,
longer by its prompt tokens, and goes to the next one. The first stage begins a step once the last one is done with
those whose tokens it decodes. After a warm-up, each stage is timed from the start of its first step to the end of its
last one: "idle_i" is the time in which stage i ran none, per step, as a share of the slowest stage's time for a step. A
stage that is faster by itself is idle for the difference; "waits" is the most that a stage is idle beyond that.
"in_flight" counts steps that were dispatched and not fetched, right after a dispatch: the last of them is planned while
the others compute. "busy" is how many stages compute at a time. Unless it is "divided", the scheduler sees one stage.

    python -m benchmarks.pipeline --json benchmarks/results/cpu/pipeline.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.scheduler import answer, capacity_of, request_of
from jaxserve.api_types import StageTimes
from jaxserve.cli.common.table import format_records
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.step_plan import Capacity, DrawResult, StepPlan, StepResult

PROMPT, CHUNK = 512, 128
TOKEN_SECONDS = 1e-5


@dataclasses.dataclass
class _Step:
    """A step on its way: the one whose tokens it needs, and when each stage began and ended it."""

    plan: StepPlan
    needs: _Step | None
    times: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class PacedStages:
    """An executor of one rank whose stage i takes `seconds[i]` for a step. `steps` are all steps that were dispatched,
    `in_flight` how many of them were not fetched when each was dispatched, itself included."""

    compiles_after_ready = 0

    def __init__(self, capacity: Capacity, seconds: Sequence[float]) -> None:
        self.capacity = capacity
        self.steps: list[_Step] = []
        self.in_flight: list[int] = []
        self._num_collected = 0
        self._last_steps: dict[int, int] = {}  # by slot
        self._endless: dict[str, int] = collections.defaultdict(lambda: 1 << 40)
        self._queues: list[queue.SimpleQueue[_Step | None]] = [queue.SimpleQueue() for _ in seconds]
        self._threads = [
            threading.Thread(target=self._run, args=(stage, pace), daemon=True) for stage, pace in enumerate(seconds)
        ]
        for thread in self._threads:
            thread.start()

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        return ()

    def stage_times(self) -> tuple[StageTimes, ...]:
        return ()

    def dispatch(self, plan: StepPlan) -> object:
        needed = [self._last_steps[chunk.slot] for chunk in plan.chunks[: plan.num_decodes]]
        self._last_steps |= {chunk.slot: len(self.steps) for chunk in plan.chunks}
        step = _Step(plan, self.steps[max(needed)] if needed else None)
        self.steps.append(step)
        self.in_flight.append(len(self.steps) - self._num_collected)
        self._queues[0].put(step)
        return step

    def collect_draws(self, handle: object) -> DrawResult:
        raise AssertionError("no request has a grammar")

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, _Step)
        handle.done.wait()
        self._num_collected += 1
        return answer(handle.plan, self._endless)

    def close(self) -> None:
        """End the threads after the steps in flight."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, stage: int, pace: float) -> None:
        last = stage + 1 == len(self._queues)
        while True:
            step = self._queues[stage].get()
            if not last:
                following = self._queues[stage + 1]
            if step is None:
                if not last:
                    following.put(None)
                return
            if stage == 0 and step.needs is not None:
                step.needs.done.wait()
            start = time.perf_counter()
            prompt_tokens = sum(chunk.length for chunk in step.plan.chunks[step.plan.num_decodes :])
            end = start + pace + TOKEN_SECONDS * prompt_tokens
            while (left := end - time.perf_counter()) > 0:
                time.sleep(left)
            step.times.append((start, time.perf_counter()))
            if last:
                step.done.set()
            else:
                following.put(step)


def measure(
    name: str, paces_ms: Sequence[float], requests: int, steps: int, *, every: int = 0, divided: bool = True
) -> dict[str, object]:
    """Return the figures of `steps` steps in which `requests` requests decode. With `every`, after each so many steps
    a prompt arrives, whose request ends with its first token."""
    capacity = capacity_of(requests + 8, (requests + 8) * (PROMPT + 4 * steps))
    capacity = msgspec.structs.replace(capacity, num_stages=len(paces_ms) if divided else 1)
    scheduler = Scheduler(
        capacity,
        chunked_prefill_size=CHUNK,
        max_prefill_tokens=CHUNK,
        max_num_batched_tokens=2048,
        conservativeness=0.0,
        prefix_cache=False,
    )
    stages = PacedStages(capacity, [pace / 1000 for pace in paces_ms])
    loop = EngineLoop(scheduler, stages)
    for number in range(requests):
        loop.add(request_of(number, [number + 1] * 32, 8000))
    warm_up = 16 * len(paces_ms)
    number = requests
    while len(stages.steps) < warm_up + steps:
        if every and len(stages.steps) >= (number - requests) * every:
            loop.add(request_of(number, [number + 1] * PROMPT, 1))
            number += 1
        loop.step()
    loop.flush()
    stages.close()
    measured = stages.steps[warm_up:]
    busy, idle = [], []
    for times in zip(*(step.times for step in measured)):
        busy.append(sum(end - start for start, end in times) / len(times))
        idle.append((times[-1][1] - times[0][0]) / len(times) - busy[-1])
    slowest = max(busy)
    waits = [one - (slowest - own) for one, own in zip(idle, busy)]
    return {
        "case": name,
        "divided": divided,
        "requests": requests,
        "pace_ms": "/".join(f"{pace:g}" for pace in paces_ms),
        "step_ms": 1e3 * slowest,
        "in_flight": statistics.median(stages.in_flight[warm_up:]),
        "busy": sum(busy) / (slowest + max(waits)),
        **{f"idle_{stage}": one / slowest for stage, one in enumerate(idle)},
        "waits": max(waits) / slowest,
        "with_prompts": sum(len(step.plan.chunks) > step.plan.num_decodes for step in measured) / len(measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=float, default=5.0, help="milliseconds of a stage for a step")
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
