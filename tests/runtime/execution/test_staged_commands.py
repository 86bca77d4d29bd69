"""The order in which pipeline stages run commands, over fake stages and transfers that write what they do to a log."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.api_types import StageTimes
from jaxserve.runtime.execution.device_commands import BroadcastCommands, FollowerExecutor
from jaxserve.runtime.execution.staged_commands import StagedCommands
from jaxserve.runtime.programs.transfers import FEEDBACK_KEY, result_key
from jaxserve.runtime.step.draw import DrawOutput
from jaxserve.runtime.step.handoff import Feedback
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY
from jaxserve.runtime.step.step import StepOutput
from tests.runtime.tiny import CAPACITY

DECODE, DRAW, DRAFT = ProgramKey("decode", 4, True), ProgramKey("draw", 8), ProgramKey("draft", 4)
NOTHING = np.zeros((1, 1), np.int32)
Log = list[tuple[Any, ...]]


def _step(number: int) -> np.ndarray:
    return np.full((1, 1), number, np.int32)


class _Stage:
    """A stage whose output of a step is its number and the step's; that of the last one has what the host reads."""

    def __init__(self, number: int, log: Log, *, is_last: bool) -> None:
        self._number, self._log, self._is_last = number, log, is_last

    def call(self, key: ProgramKey, packed: np.ndarray, *given: Any) -> Any:
        step = int(packed[0, 0])
        self._log.append((self._number, str(key), step, *given))
        feedback: Any = f"feedback of {key.kind} {step}"
        if key.kind == "draft":
            return Feedback(feedback, None, None)
        if key.kind == "draw":
            return DrawOutput(f"draw {step}", None, feedback)  # type: ignore[arg-type]
        if key.kind in ("update", "adjust"):
            return ()
        if self._is_last:
            return StepOutput(f"tokens {step}", "", None, None, None, feedback)  # type: ignore[arg-type]
        return f"hidden {step} of {self._number}"

    def save(self, group: int, pages: Any, slots: Any) -> None:
        self._log.append((self._number, "save", group))

    def load(self, group: int, pages: Any, slots: Any) -> None:
        self._log.append((self._number, "load", group))

    def store_arrived(self) -> None: ...


class _Transfer:
    """Gives what it is given, `here` if the target is of this process. With `results`, it takes those of each step."""

    def __init__(self, log: Log, name: str, *, here: bool = True, results: bool = False) -> None:
        self._log, self._name, self._here = log, name, here
        self.fields = {FEEDBACK_KEY: ("feedback",)}
        if results:
            self.fields |= {result_key(key): ("feedback", "tokens") for key in (DECODE, DRAW)}

    def send(self, key: ProgramKey, sent: Any) -> Any:
        self._log.append((self._name, str(key), "sent" if sent is not None else "elsewhere"))
        if not self._here:
            return None
        return (
            sent if sent is not None else dict.fromkeys(self.fields.get(key, ()), "from elsewhere") or "from elsewhere"
        )


class _Clock:
    times = StageTimes(1.0, 2.0)

    def plan(self) -> None: ...

    def watch(self, given: Any, output: Any) -> None: ...


def _commands(log: Log, count: int, here: range | None = None) -> StagedCommands:
    """The commands of the process that has the stages `here`, all by default."""
    own = range(count) if here is None else here
    stages = [_Stage(i, log, is_last=i == count - 1) if i in own else None for i in range(count)]
    targets = [*range(1, count), 0]
    several = here is not None
    transfers = [
        _Transfer(log, f"{i}-{to}", here=to in own, results=several) if i in own or to in own else None
        for i, to in enumerate(targets)
    ]
    clocks = [None if stage is None else _Clock() for stage in stages]
    return StagedCommands(CAPACITY, stages, transfers, clocks, "first feedback")  # type: ignore[arg-type]


def _steps(log: Log) -> list[tuple[int, int]]:
    """The stages and steps, in the order in which they started."""
    return [(entry[0], entry[2]) for entry in log if isinstance(entry[0], int) and entry[1].startswith("decode")]


def _start(commands: Any, number: int, after: int = -1) -> list[Any]:
    received: list[Any] = []
    assert commands.start(DECODE, _step(number), after, received.append) == number
    return received


def test_a_stage_starts_a_step_a_tick_after_the_stage_before_it() -> None:
    log: Log = []
    commands = _commands(log, 3)
    received = [_start(commands, number) for number in range(4)]
    assert _steps(log) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (0, 3)]
    assert [len(one) for one in received] == [1, 1, 0, 0]
    assert received[0][0].tokens == "tokens 0"
    commands.finish(3)
    assert [one[0].tokens for one in received] == ["tokens 0", "tokens 1", "tokens 2", "tokens 3"]
    assert all(commands.is_started(number) for number in range(4))


def test_hidden_states_go_on_and_tokens_go_back_once_all_stages_have_started() -> None:
    log: Log = []
    commands = _commands(log, 2)
    _start(commands, 0)
    _start(commands, 1)
    _start(commands, 2, after=0)
    assert log == [
        (0, "decode-4-full", 0, "first feedback"),
        ("0-1", "send-4", "sent"),
        (1, "decode-4-greedy", 0, "hidden 0 of 0"),
        (0, "decode-4-full", 1, "first feedback"),
        ("1-0", "feedback", "sent"),
        ("0-1", "send-4", "sent"),
        (1, "decode-4-greedy", 1, "hidden 1 of 0"),
        (0, "decode-4-full", 2, "feedback of decode 0"),
        ("1-0", "feedback", "sent"),
        ("0-1", "send-4", "sent"),
    ]


def test_a_step_that_needs_tokens_of_the_one_before_lets_it_pass_all_stages() -> None:
    log: Log = []
    commands = _commands(log, 3)
    _start(commands, 0)
    received = _start(commands, 1, after=0)
    assert _steps(log) == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert log[-2] == (0, "decode-4-full", 1, "feedback of decode 0")
    _start(commands, 2, after=-1)  # goes on behind it
    assert _steps(log)[4:] == [(1, 1), (0, 2)]
    commands.finish(1)
    assert len(received) == 1


def test_commands_keep_their_order_on_every_stage() -> None:
    log: Log = []
    commands = _commands(log, 2)
    _start(commands, 0)
    commands.save(1, [[0]], [[0]])
    commands.run(UPDATE_KEY, _step(10))
    commands.run(ADJUST_KEY, _step(11))
    commands.load(0, [[0]], [[0]])
    _start(commands, 1)
    commands.finish(1)
    by_stage = [[entry[1] for entry in log if entry[0] == stage] for stage in range(2)]
    assert by_stage[0] == ["decode-4-full", "save", "update", "load", "decode-4-full"]
    assert by_stage[1] == ["decode-4-greedy", "save", "update", "adjust", "load", "decode-4-greedy"]


@pytest.mark.parametrize("key", [DRAW, DRAFT], ids=str)
def test_the_last_stage_draws_before_steps_that_others_wait_for(key: ProgramKey) -> None:
    log: Log = []
    commands = _commands(log, 3)
    for number in range(3):
        _start(commands, number)
    output = commands.run(key, _step(7), after=0)
    assert _steps(log)[-3:] == [(2, 0), (1, 1), (0, 2)], "nothing had to be started for it"
    if key == DRAW:
        assert output.tokens == "draw 7"
    _start(commands, 3, after=0)
    feedback: Any = f"feedback of {key.kind} 7"
    assert (0, "decode-4-full", 3, feedback if key == DRAW else Feedback(feedback, None, None)) in log
    assert _steps(log)[-3:] == [(2, 1), (1, 2), (0, 3)]


def test_a_draw_waits_for_the_step_whose_hidden_states_it_needs() -> None:
    log: Log = []
    commands = _commands(log, 3)
    _start(commands, 0)
    commands.run(DRAW, _step(7), after=0)
    assert [(entry[0], entry[1]) for entry in log if isinstance(entry[0], int)][-1] == (2, "draw-8")
    assert _steps(log) == [(0, 0), (1, 0), (2, 0)]


def test_processes_do_the_same_ticks_and_results_reach_the_first_stage() -> None:
    logs: list[Log] = [[], []]
    sent: list[bytes] = []
    here, there = _commands(logs[0], 2, range(1)), _commands(logs[1], 2, range(1, 2))
    leader = BroadcastCommands(here, sent.append)
    leader.run(UPDATE_KEY, _step(5))
    received = [_start(leader, 0), _start(leader, 1)]
    drawn = leader.run(DRAW, _step(6), 0)
    received.append(_start(leader, 2, after=0))
    leader.finish(1)  # is done
    leader.finish(2)
    follower = FollowerExecutor(there, [UPDATE_KEY, DRAW, DECODE], 1, lambda reason: None)
    assert len(sent) == 6, "what all know already is not sent"
    for command in sent:
        follower.execute(command)
    transfers = [[entry[:2] for entry in log if isinstance(entry[0], str)] for log in logs]
    assert transfers[0] == transfers[1]
    assert drawn.tokens == "from elsewhere"
    assert [one[0].tokens for one in received] == ["from elsewhere"] * 3
    assert [entry for entry in logs[1] if entry[0] == 0] == []
    assert here.stage_times() == {0: StageTimes(1.0, 2.0)}
    assert there.stage_times() == {1: StageTimes(1.0, 2.0)}


def test_another_kind_of_step_has_its_own_transfer() -> None:
    log: Log = []
    commands = _commands(log, 2)
    capacity = msgspec.structs.replace(CAPACITY)
    received: list[Any] = []
    commands.start(ProgramKey("mixed", capacity.token_buckets[0], False), _step(0), -1, received.append)
    commands.finish(0)
    assert [entry[1] for entry in log if isinstance(entry[0], int)] == ["mixed-8-full", "mixed-8-full"]
    assert ("0-1", "send-8", "sent") in log
