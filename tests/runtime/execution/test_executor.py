from __future__ import annotations

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.runtime.execution.device_commands import LocalCommands, Receive
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.programs.table import KINDS, step_keys
from jaxserve.runtime.step.kv_scales import KV_SCALES_KEY
from jaxserve.runtime.step.page_copies import read_key, row_specs, write_key
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.sampling import Logprobs
from jaxserve.runtime.step.slot_update import ADJUST_KEY, SLOTS, UPDATE_KEY, update_packing
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity, StepPlan
from tests.runtime.tiny import CAPACITY, builder, mesh, opening, params, prefill, specs, zero_state


class Output:
    """A fake of an array on a device, which counts its transfers."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.copies = self.fetches = 0

    def copy_to_host_async(self) -> None:
        self.copies += 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.fetches += 1
        return self.array


class Commands:
    """A fake of the devices. Row r of rank k draws token 10 * k + r; all its log probabilities are -1."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.updates: list[tuple[ProgramKey, np.ndarray]] = []
        self.steps: list[tuple[ProgramKey, np.ndarray]] = []
        shape = (num_ranks, 8)
        tokens = np.arange(8) + 10 * np.arange(num_ranks)[:, None]
        self.tokens = Output(tokens[:, :, None])
        self.logprobs = [Output(x) for x in (np.full(shape, -1.0), np.zeros((*shape, 20)), np.full((*shape, 20), -1.0))]

    def run(self, key: ProgramKey, packed: np.ndarray, after: int = -1) -> None:
        (self.steps if KINDS[key.kind].takes_weights else self.updates).append((key, packed))

    def start(self, key: ProgramKey, packed: np.ndarray, after: int, receive: Receive) -> int:
        self.steps.append((key, packed))
        receive(StepOutput(self.tokens, self.tokens, Logprobs(*self.logprobs), None, None))  # type: ignore[arg-type]
        return len(self.steps) - 1

    def finish(self, number: int) -> None: ...

    def store_arrived(self) -> None: ...


def _run(commands: Commands, capacity: Capacity, *opens: Any) -> Any:
    chunks = [prefill(one.slot, 0, [1]) for one in opens]
    plan = StepPlan(opens=list(opens), chunks=chunks, num_decodes=0, greedy=False)
    executor = DeviceExecutor(commands, capacity)  # type: ignore[arg-type]
    return executor.collect(executor.dispatch(plan))


def test_the_first_prompts_decide_the_kv_scales_before_their_step() -> None:
    commands = Commands(num_ranks=2)
    capacity = msgspec.structs.replace(CAPACITY, num_ranks=2)
    executor = DeviceExecutor(commands, capacity, calculates_kv_scales=True)  # type: ignore[arg-type]

    def dispatch(*chunks: Any) -> list[ProgramKey]:
        plan = StepPlan(opens=[], chunks=list(chunks), num_decodes=0, greedy=False)
        executor._sampling.update({(chunk.rank, chunk.slot): opening(0).sampling for chunk in chunks})
        before = len(commands.steps)
        executor.dispatch(plan)
        return [key for key, _ in commands.steps[before:]]

    executor.connect()
    on_the_other_rank = msgspec.structs.replace(prefill(1, 0, [4, 5]), rank=1)
    step = ProgramKey("mixed", 8, False)
    assert dispatch(prefill(0, 0, [1, 2, 3]), on_the_other_rank) == [KV_SCALES_KEY, step]
    assert dispatch(prefill(2, 0, [6, 7])) == [step]
    [scales] = [packed for key, packed in commands.steps if key == KV_SCALES_KEY]
    assert scales.shape[0] == 2
    assert scales[:, :6].tolist() == [[5, 1, 2, 3, 4, 5]] * 2, "every rank sees the prompts of all"


@pytest.mark.parametrize("wanted", [False, True])
def test_log_probabilities_are_fetched_only_if_a_request_wants_them(wanted: bool) -> None:
    commands = Commands()
    result = _run(commands, CAPACITY, opening(0), opening(1, logprobs=2 if wanted else None))
    assert result.tokens == [[0], [1]]
    assert list(result.logprobs) == [1] * wanted
    assert (commands.tokens.copies, commands.tokens.fetches) == (1, 1)
    assert [(one.copies, one.fetches) for one in commands.logprobs] == [(wanted, wanted)] * 3


def test_the_slots_of_a_step_are_opened_together() -> None:
    commands = Commands()
    _run(commands, CAPACITY, *(opening(slot) for slot in (3, 0, 2)))
    [(key, packed)] = commands.updates
    assert (key, packed.shape) == (UPDATE_KEY, (1, update_packing(1).size))
    assert packed[0, :SLOTS].tolist() == [3, 0, 2] + [-1] * (SLOTS - 3)


def test_penalties_take_a_second_command() -> None:
    commands = Commands()
    _run(commands, CAPACITY, opening(0, repetition_penalty=2.0), opening(1))
    assert [key for key, _ in commands.updates] == [UPDATE_KEY, ADJUST_KEY]


def test_ranks_open_slots_in_the_same_command() -> None:
    commands = Commands(num_ranks=2)
    executor = DeviceExecutor(commands, msgspec.structs.replace(CAPACITY, num_ranks=2))  # type: ignore[arg-type]
    opens = [opening(slot, rank=rank) for slot, rank in ((1, 0), (2, 1), (3, 1))]
    chunks = [msgspec.structs.replace(prefill(one.slot, 0, [1]), rank=one.rank) for one in opens]
    plan = StepPlan(opens=opens, chunks=chunks, num_decodes=0, greedy=False)
    result = executor.collect(executor.dispatch(plan))
    assert result.tokens == [[0], [10], [11]]
    [(_, packed)] = commands.updates
    assert packed[:, :3].tolist() == [[1, -1, -1], [2, 3, -1]]


FEW = msgspec.structs.replace(CAPACITY, decode_buckets=(4,), token_buckets=(16,))
KEYS: list[ProgramKey] = [UPDATE_KEY, ADJUST_KEY, read_key(0), write_key(0), *step_keys(FEW)]


def _random_state() -> Any:
    """Return a state that is nowhere zero, as if requests were in the middle of their work."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jax.device_put(rng.integers(1, 3, a.shape).astype(a.dtype), a.sharding), zero_state(FEW)
    )


@pytest.mark.slow
def test_a_run_without_requests_changes_nothing() -> None:
    runs: list[ProgramKey] = []

    def counted(key: ProgramKey) -> Any:
        program = builder(FEW).compile(key)

        def run(*arguments: Any) -> Any:
            runs.append(key)
            return program(*arguments)

        return run

    before = jax.tree.map(np.asarray, _random_state())
    host = HostPool(row_specs(specs(FEW), 0), 4, mesh())
    commands = LocalCommands(params(), _random_state(), {key: counted(key) for key in KEYS}, [host], mesh())
    executor = DeviceExecutor(commands, FEW)
    compiled = executor.compiles_after_ready
    executor.warm_up(KEYS)
    assert runs == [*KEYS, *KEYS], "a program with collectives builds its CUDA graph in the second run"
    assert executor.compiles_after_ready == compiled
    for ours, theirs in zip(jax.tree.leaves(commands._state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
