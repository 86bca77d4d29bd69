"""The closed set of programs: each updates the state in place, and its steps follow one another."""

from __future__ import annotations

import re
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.runtime.programs.table import step_keys
from jaxserve.runtime.step.program import ProgramKey
from tests.runtime.programs.large_pool import CAPACITY, KEYS, STEPS, first_step
from tests.runtime.tiny import open_slots, opening, specs, zero_state

pytestmark = pytest.mark.slow


def test_the_step_keys_follow_from_the_sizes() -> None:
    capacity = msgspec.structs.replace(CAPACITY, decode_buckets=(2, 4), token_buckets=(8, 16))
    assert [str(key) for key in step_keys(capacity)] == [
        "decode-2-greedy",
        "decode-2-full",
        "decode-4-greedy",
        "decode-4-full",
        "mixed-8-full",
        "mixed-16-full",
        "prompt_logprobs-8-full",
    ]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_state_is_aliased_not_copied(programs: dict[ProgramKey, Any], key: ProgramKey) -> None:
    memory = programs[key].memory_analysis()
    state = specs(CAPACITY)
    total = sum(spec.nbytes for spec in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= total
    assert memory.temp_size_in_bytes < state.kv[0].keys.nbytes / 4


@pytest.mark.parametrize("key", STEPS, ids=str)
def test_profiles_can_tell_the_parts_of_a_step_apart(programs: dict[ProgramKey, Any], key: ProgramKey) -> None:
    text = programs[key].as_text()
    name = str(key).replace("-", "_")
    assert text.startswith(f"HloModule jit_{name},")
    scopes = set(re.findall(rf'op_name="jit\({name}\)/(?:.*/)?(layer_\d+)/jit\(\w+\)/(\w+)/', text))
    assert {("layer_0", "attention"), ("layer_0", "mlp"), ("layer_1", "attention"), ("layer_1", "mlp")} <= scopes
    for phase in ("read_input", "embed", "final_norm", "head", "sample", "write_state"):
        assert re.search(rf'op_name="jit\({name}\)/(?:.*/)?{phase}/', text), phase


def test_the_pool_stays_in_place(programs: dict[ProgramKey, Any]) -> None:
    state = zero_state(CAPACITY)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    after = open_slots(programs, state, opening(), capacity=CAPACITY)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == where
    _, after, _ = first_step(programs)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)}) == len(where)


def test_a_step_leaves_the_state_that_the_next_one_needs(programs: dict[ProgramKey, Any]) -> None:
    _, state, output = first_step(programs)
    token = int(output.tokens[0, 0, 0])
    assert np.asarray(state.seq_lens)[0].tolist() == [0, 3, 0, 0]
    assert np.asarray(state.last_tokens)[0].tolist() == [0, token, 0, 0]
    assert int(state.page_tables[0][0, 1, 0]) == 9
    assert np.argwhere(np.asarray(state.counts)[0]).tolist() == [[1, token]]
    written = np.argwhere(np.abs(np.asarray(state.kv[0].keys)[0]).sum(axis=(0, 3)) > 0).tolist()
    assert written == [[layer * CAPACITY.num_pages + 9, i] for layer in range(2) for i in range(3)]
