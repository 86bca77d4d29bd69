"""Plans made by hand, and the exact input that the model must get from them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.runtime.step.batch import StepInput, choose_program, pack_step, step_shape, unpack_step
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.state import DeviceState, one_rank
from jaxserve.step_plan import Chunk, StepPlan, WindowGroup
from tests.runtime.tiny import CAPACITY, decode, prefill, zero_state

WIDTH = 6
TABLES = np.array([[10 * slot + column for column in range(WIDTH)] for slot in range(4)], np.int32) % 20


def _plan(*chunks: Chunk, greedy: bool = False) -> StepPlan:
    num_decodes = sum(chunk.tokens is None for chunk in chunks)
    return StepPlan(opens=[], chunks=list(chunks), num_decodes=num_decodes, greedy=greedy)


def _state() -> DeviceState:
    return dataclasses.replace(
        one_rank(zero_state(CAPACITY)),
        last_tokens=jnp.array([44, 33, 55, 66], jnp.int32),
        seq_lens=jnp.array([8, 4, 7, 0], jnp.int32),
        page_tables=(jnp.asarray(TABLES),),
    )


def _through(plan: StepPlan) -> tuple[ProgramKey, StepInput, DeviceState]:
    key = choose_program(plan, CAPACITY)
    shape = step_shape(key, CAPACITY)
    [packed] = pack_step(plan, shape, CAPACITY)
    inputs, state = jax.jit(unpack_step, static_argnums=2)(packed, _state(), shape)
    return key, inputs, state


def _equal(found: jax.Array, expected: list[int] | list[bool] | np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_mixed_step() -> None:
    key, inputs, state = _through(
        _plan(
            decode(2, 7),
            decode(0, 8, (13,)),
            prefill(1, 4, [9, 8], (7,), sample=False),
            prefill(3, 0, [1, 2, 3, 4, 5], (5, 6)),
        )
    )
    assert key == ProgramKey("mixed", 16, False)
    batch = inputs.batch
    _equal(batch.tokens[:9], [55, 44, 9, 8, 1, 2, 3, 4, 5])
    _equal(batch.positions, [7, 8, 4, 5, 0, 1, 2, 3, 4] + [0] * 7)
    _equal(batch.query_starts, [0, 1, 2, 4, 9])
    _equal(batch.kv_lens, [8, 9, 6, 5])
    assert (int(batch.num_decodes), int(batch.num_seqs), batch.decode_only) == (2, 4, False)
    assert (int(batch.num_continued), batch.starts_last) == (3, True)
    tables = TABLES.copy()
    tables[0, 2], tables[3, :2], tables[1, 1] = 13, (5, 6), 7
    _equal(state.page_tables[0], tables)
    _equal(batch.page_tables[0], tables[[2, 0, 1, 3]])
    _equal(inputs.slots, [2, 0, 1, 3])
    _equal(inputs.samples, [True, True, False, True])
    assert inputs.targets is None
    _equal(state.seq_lens, [8, 4, 7, 0])


def test_rows_without_a_chunk_touch_no_slot() -> None:
    key, inputs, state = _through(_plan(decode(2, 7), prefill(3, 0, [1, 2], (5,))))
    assert key == ProgramKey("mixed", 8, False)
    _equal(inputs.batch.query_starts, [0, 1, 3, 3, 3])
    _equal(inputs.batch.kv_lens, [8, 2, 0, 0])
    _equal(inputs.batch.positions, [7, 0, 1, 0, 0, 0, 0, 0])
    _equal(inputs.slots, [2, 3, 4, 4])
    _equal(inputs.samples, [True, True, False, False])
    changed = np.argwhere(np.asarray(state.page_tables[0]) != TABLES)
    assert changed.tolist() == [[3, 0]]


def test_decode_step() -> None:
    key, inputs, state = _through(_plan(decode(2, 7), decode(0, 8, (13,)), decode(1, 4, (17,)), greedy=True))
    assert key == ProgramKey("decode", 4, True)
    batch = inputs.batch
    _equal(batch.tokens[:3], [55, 44, 33])
    _equal(batch.positions[:3], [7, 8, 4])
    _equal(batch.query_starts, [0, 1, 2, 3, 3])
    _equal(batch.kv_lens, [8, 9, 5, 0])
    assert (int(batch.num_decodes), int(batch.num_seqs), batch.decode_only) == (3, 3, True)
    _equal(inputs.slots, [2, 0, 1, 4])
    _equal(inputs.samples, [True, True, True, False])
    assert int(state.page_tables[0][0, 2]) == 13
    assert int(state.page_tables[0][1, 1]) == 17


def test_new_pages_of_each_group_go_to_the_same_columns() -> None:
    capacity = msgspec.structs.replace(CAPACITY, window_groups=(WindowGroup(9, 5),))
    chunks = [decode(0, 8, (13,)), prefill(3, 4, [1] * 5, (5, 6)), decode(2, 7)]
    chunks[0] = msgspec.structs.replace(chunks[0], new_pages=((13,), (8,)))
    chunks[1] = msgspec.structs.replace(chunks[1], new_pages=((5, 6), (2, 1)))
    plan = _plan(*chunks)
    shape = step_shape(choose_program(plan, capacity), capacity)
    [packed] = pack_step(plan, shape, capacity)
    state = dataclasses.replace(_state(), page_tables=(jnp.asarray(TABLES), jnp.asarray(TABLES + 100)))
    inputs, state = unpack_step(packed, state, shape)
    for table, batch_table, start, pages in zip(
        state.page_tables, inputs.batch.page_tables, (0, 100), ((13, 5, 6), (8, 2, 1))
    ):
        expected = TABLES + start
        expected[0, 2], expected[3, 1:3] = pages[0], pages[1:]
        _equal(table, expected)
        _equal(batch_table[:3], expected[[0, 3, 2]])


def test_positions_follow_the_lengths_on_the_device() -> None:
    """`start` may be ahead of the device: it decides where pages go, never the positions of tokens."""
    _, inputs, _ = _through(_plan(decode(2, 9), decode(0, 11)))
    _equal(inputs.batch.positions, [7, 8])
    _equal(inputs.batch.kv_lens, [8, 9])


def test_a_chunk_that_starts_within_a_page_appends_after_it() -> None:
    _, _, state = _through(_plan(prefill(2, 7, [1] * 6, (18, 19))))
    tables = TABLES.copy()
    tables[2, 2:4] = 18, 19
    _equal(state.page_tables[0], tables)


def test_prompt_logprobs_get_their_targets() -> None:
    key, inputs, _ = _through(
        _plan(decode(0, 8, (13,)), prefill(1, 4, [9]), prefill(3, 0, [1, 2, 3], (5,), sample=False, logits=3, target=7))
    )
    assert key == ProgramKey("prompt_logprobs", 8, False)
    assert inputs.targets is not None
    _equal(inputs.targets[2:5], [2, 3, 7])


@pytest.mark.parametrize(
    ("chunks", "greedy", "expected"),
    [
        ([decode(0, 8)], True, "decode-2-greedy"),
        ([decode(0, 8), decode(1, 4)], False, "decode-2-full"),
        ([decode(slot, 8) for slot in range(3)], True, "decode-4-greedy"),
        ([prefill(0, 0, [1])], True, "mixed-8-full"),
        ([prefill(0, 0, [1] * 8)], False, "mixed-8-full"),
        ([decode(0, 8), prefill(1, 0, [1] * 8)], False, "mixed-16-full"),
        ([msgspec.structs.replace(decode(0, 8), length=3, logits=3), prefill(1, 0, [1] * 5)], False, "mixed-8-full"),
        ([prefill(0, 0, [1], sample=False, target=3, logits=1)], False, "prompt_logprobs-8-full"),
        ([prefill(0, 0, [1, 2], logits=2)], False, "prompt_logprobs-8-full"),
    ],
)
def test_the_smallest_sufficient_program_is_chosen(chunks: list[Chunk], greedy: bool, expected: str) -> None:
    assert str(choose_program(_plan(*chunks, greedy=greedy), CAPACITY)) == expected


def test_a_full_step_holds_all_its_pages() -> None:
    """Rows that start a page with one token each take far more pages than their tokens fill."""
    chunks = [prefill(slot, 4, [1], (slot,)) for slot in range(3)] + [prefill(3, 4, [1] * 13, (9, 10, 11, 12))]
    key, inputs, state = _through(_plan(*chunks))
    assert key.size == 16
    _equal(inputs.batch.query_starts, [0, 1, 2, 3, 16])
    _equal(state.page_tables[0][:3, 1], [0, 1, 2])
    _equal(state.page_tables[0][3, 1:5], [9, 10, 11, 12])
