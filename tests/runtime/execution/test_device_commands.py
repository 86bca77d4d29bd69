from __future__ import annotations

import queue
from typing import Any

import numpy as np

from jaxserve.runtime.execution.device_commands import BroadcastCommands, FollowerExecutor, LocalCommands
from jaxserve.runtime.step.page_copies import PAGES_PER_COPY, read_key, write_key
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY

DECODE = ProgramKey("decode", 4, True)


class Host:
    """A fake of the host pool, whose rows are numbers."""

    pages_per_copy = PAGES_PER_COPY

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}

    def store(self, slots: list[list[int]], rows: Any) -> None:
        self.rows[str(slots)] = rows

    def fetch(self, slots: list[list[int]]) -> Any:
        return self.rows[str(slots)]

    def store_arrived(self) -> None: ...


def _programs(log: list[Any]) -> dict[Any, Any]:
    """Return fake programs, each of which adds its input to a state whose only leaf is a number."""
    Leaves = tuple[int]

    Result = tuple[Leaves, Any]

    def step(params: Leaves, state: Leaves, packed: np.ndarray) -> Result:
        log.append(("step", packed.tolist()))
        return (state[0] + params[0] * int(packed.sum()),), state

    def update(params: tuple[()], state: Leaves, packed: np.ndarray) -> Result:
        log.append(("update", packed.tolist()))
        return (state[0] + int(packed.sum()),), ()

    def adjust(params: tuple[()], state: Leaves, packed: np.ndarray) -> Result:
        log.append(("adjust", packed.tolist()))
        return (state[0] - int(packed.sum()),), ()

    def read(params: tuple[()], state: Leaves, packed: np.ndarray) -> Result:
        log.append(("read", packed.tolist()))
        return state, (state[0] * 2,)

    def write(params: tuple[()], state: Leaves, packed: np.ndarray, row: int) -> Result:
        log.append(("write", packed.tolist(), row))
        return (state[0] + row,), ()

    return {DECODE: step, UPDATE_KEY: update, ADJUST_KEY: adjust, read_key(1): read, write_key(1): write}


def test_a_follower_runs_the_same_commands_with_the_same_bytes() -> None:
    sent: list[bytes] = []
    logs: list[list[Any]] = [[], []]
    here, there = (LocalCommands(3, 1, _programs(log), [Host(), Host()]) for log in logs)  # type: ignore[arg-type]
    leader = BroadcastCommands(here, sent.append)
    packed = np.arange(6, dtype=np.int32).reshape(2, 3)
    leader.run(UPDATE_KEY, packed)
    leader.run(ADJUST_KEY, packed + 2)
    leader.run(DECODE, packed * 2)
    leader.save(1, [[3, 4], [5]], [[1], []])
    leader.run(DECODE, packed)
    leader.load(1, [[], [6]], [[1], []])
    leader.run(DECODE, -packed)
    follower = FollowerExecutor(there, _programs([]), 2, lambda reason: None)
    for command in sent:
        follower.execute(command)
    assert logs[0] == logs[1]
    assert [name for name, *_ in logs[0]] == ["update", "adjust", "step", "read", "step", "write", "step"]
    assert here._state == there._state


def test_a_command_is_sent_before_it_runs() -> None:
    log: list[Any] = []
    calls = BroadcastCommands(LocalCommands(1, 0, _programs(log)), lambda _: log.append("sent"))
    calls.run(DECODE, np.zeros((1, 1), np.int32))
    assert log == ["sent", ("step", [[0]])]


def test_a_failed_step_of_a_follower_is_reported() -> None:
    class Poisoned:
        def block_until_ready(self) -> None:
            raise RuntimeError("out of memory")

    programs = {DECODE: lambda params, state, packed: (state, Poisoned())}
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    follower = FollowerExecutor(LocalCommands(0, 0, programs), programs, 1, told.put)  # type: ignore[arg-type]
    sent: list[bytes] = []
    BroadcastCommands(LocalCommands(0, 0, programs), sent.append).run(DECODE, np.zeros((1, 1), np.int32))  # type: ignore[arg-type]
    follower.execute(sent[0])
    assert told.get(timeout=60) == "a step failed: RuntimeError: out of memory"
