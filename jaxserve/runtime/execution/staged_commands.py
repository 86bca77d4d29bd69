"""Runs the commands of pipeline stages: each stage computes its part of a step one tick after the stage before it.

In a tick, every stage starts its part of another step, and then each gives its result to the next. So a step that is
started enters the first stage, while those before it are in the others. Each stage runs all commands in their order,
except for draws and drafts: the last stage runs them at once, before steps that others wait for. They concern slots
that none of these steps has.

Every process of a mesh gets the same commands and does the same ticks. It runs what its own stages take part in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.api_types import StageTimes
from jaxserve.runtime.execution.device_commands import LocalCommands, Pages, Receive
from jaxserve.runtime.execution.stage_clock import StageClock
from jaxserve.runtime.execution.stage_transfer import StageTransfer
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.programs.transfers import FEEDBACK_KEY, result_key, send_key
from jaxserve.runtime.step.draw import DRAW, DrawOutput
from jaxserve.runtime.step.handoff import Feedback
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity


@dataclasses.dataclass
class _Step:
    """A step that enters the first stage in `tick`; `given` is what the stage that computes it next gets."""

    tick: int
    key: ProgramKey
    packed: np.ndarray
    given: Any
    receive: Receive


class StagedCommands:
    """Runs commands on the stages of this process.

    `stages` and `clocks` are by stage, None for one of another process. `transfers[i]` leads from stage i to the next
    one, the last transfer to the first stage; it is None if neither stage is of this process. The first stage gets
    `feedback` before any step was computed.
    """

    def __init__(
        self,
        capacity: Capacity,
        stages: Sequence[LocalCommands | None],
        transfers: Sequence[StageTransfer | None],
        clocks: Sequence[StageClock | None],
        feedback: Any,
    ) -> None:
        self._capacity = capacity
        self._stages = stages
        self._transfers = transfers
        self._clocks = clocks
        self._feedback = feedback
        self._queues: list[deque[_Step | Callable[[], Any]]] = [deque() for _ in stages]
        self._tick = 0
        self._steps: dict[int, _Step] = {}  # in flight, by the tick in which they enter
        self._entered: dict[int, int] = {}  # the tick of each step in flight, by its number
        self._num_steps = 0

    def start(self, key: ProgramKey, packed: np.ndarray, after: int, receive: Receive) -> int:
        """Start the next step, and return its number; `receive` gets its output when the last stage has started it.

        All stages first start step `after`: it draws tokens that this one computes with.
        """
        self.finish(after)
        number, tick = self._num_steps, self._tick + 1
        self._num_steps += 1
        self._entered[number] = tick
        self._steps[tick] = step = _Step(tick, key, packed, self._feedback, receive)
        for queue, clock in zip(self._queues, self._clocks):
            queue.append(step)
            if clock is not None:
                clock.plan()
        self._advance()
        return number

    def finish(self, number: int) -> None:
        """Have all stages start a step and those before it."""
        while not self.is_started(number):
            self._advance()

    def is_started(self, number: int) -> bool:
        """Return whether all stages have started a step; a step below 0 counts as one."""
        return number not in self._entered

    def run(self, key: ProgramKey, packed: np.ndarray, after: int = -1) -> Any:
        """Run a program that is no step, one that draws or drafts after step `after`; only draws have an output."""
        kind, last = KINDS[key.kind], len(self._stages) - 1
        if kind.takes_weights:
            self.finish(after)
            return self._run_at_once(key, packed)
        for stage in [last] if kind.where_drawn else range(len(self._stages)):
            self._in_order(stage, lambda calls: calls.call(key, packed))
        return ()

    def save(self, group: int, pages: Pages, slots: Pages) -> None:
        """Copy pages of every stage to host memory."""
        for stage in range(len(self._stages)):
            self._in_order(stage, lambda calls: calls.save(group, pages, slots))

    def load(self, group: int, pages: Pages, slots: Pages) -> None:
        """Copy pages of every stage back."""
        for stage in range(len(self._stages)):
            self._in_order(stage, lambda calls: calls.load(group, pages, slots))

    def store_arrived(self) -> None:
        """Store the saved pages whose copies to the host are complete."""
        for calls in self._stages:
            if calls is not None:
                calls.store_arrived()

    def stage_times(self) -> Mapping[int, StageTimes]:
        """Return the times of the stages of this process, by number."""
        return {number: clock.times for number, clock in enumerate(self._clocks) if clock is not None}

    def _in_order(self, stage: int, command: Callable[[LocalCommands], Any]) -> None:
        """Run a command on a stage, after the commands that wait there."""
        calls, queue = self._stages[stage], self._queues[stage]
        if calls is None:
            return
        if queue:
            queue.append(functools.partial(command, calls))
        else:
            command(calls)

    def _advance(self) -> None:
        """Do a tick. First all stages start, then all transfers: none waits for a stage later than its next step."""
        self._tick += 1
        given: list[tuple[int, _Step, Any]] = []
        for stage in reversed(range(len(self._stages))):
            if (step := self._steps.get(self._tick - stage)) is not None:
                given.append((stage, step, self._compute(stage, step)))
        for stage, step, output in given:
            self._give(stage, step, output)

    def _compute(self, stage: int, step: _Step) -> Any:
        """Start a stage's part of a step, after what waits there. Return its output, None if the stage is elsewhere."""
        calls, queue = self._stages[stage], self._queues[stage]
        if calls is None:
            queue.popleft()
            return None
        while (command := queue.popleft()) is not step:
            assert callable(command), "steps are computed in order"
            command()
        output = calls.call(self._key_of(stage, step.key), step.packed, step.given)
        clock = self._clocks[stage]
        assert clock is not None
        clock.watch(step.given, output)
        return output

    def _key_of(self, stage: int, key: ProgramKey) -> ProgramKey:
        """Return the key of a step's program on a stage: only the last one has any without a sampler."""
        return key._replace(greedy=False) if key.greedy and stage < len(self._stages) - 1 else key

    def _give(self, stage: int, step: _Step, output: Any) -> None:
        """Give a stage's output to the next one, and the last one's to the first and to the host."""
        if stage < len(self._stages) - 1:
            transfer = self._transfers[stage]
            step.given = transfer and transfer.send(send_key(step.key, self._capacity), output)
            return
        del self._steps[step.tick]
        self._entered = {number: tick for number, tick in self._entered.items() if tick != step.tick}
        step.receive(self._give_back(step.key, output))

    def _give_back(self, key: ProgramKey, output: Any) -> Any:
        """Give the feedback of an output to the first stage, and return the output that the host reads.

        If the last stage is of another process, that is what arrived at the first one.
        """
        transfer = self._transfers[-1]
        if transfer is None:
            return output
        name = result_key(key) if result_key(key) in transfer.fields else FEEDBACK_KEY
        if isinstance(output, Feedback):  # of a draft model
            sent: dict[str, Any] | None = {"feedback": output}
        else:
            sent = None if output is None else {field: getattr(output, field) for field in transfer.fields[name]}
        arrived = transfer.send(name, sent)
        if arrived is None:
            return output
        self._feedback = arrived.pop("feedback")
        if not arrived:
            return output
        if key.kind == DRAW.name:
            return DrawOutput(arrived["tokens"], arrived.get("logprobs"))
        missing = {field.name: None for field in dataclasses.fields(StepOutput)}
        return StepOutput(**{**missing, **arrived})

    def _run_at_once(self, key: ProgramKey, packed: np.ndarray) -> Any:
        """Run a draw, or a program of a draft model, on the last stage."""
        calls = self._stages[-1]
        return self._give_back(key, None if calls is None else calls.call(key, packed))
