"""Opening slots sets their state, with any number of calls, and leaves other slots unchanged."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS, SHARED_OPTIONS
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.step.program import ProgramKey, StepContext
from jaxserve.runtime.step.slot_update import (
    ADJUST,
    ADJUST_KEY,
    BIASES,
    PAGES,
    PENALIZED_SLOTS,
    SLOTS,
    TOKENS,
    UPDATE_KEY,
    pack_adjustments,
    pack_updates,
    update,
    update_packing,
)
from jaxserve.runtime.step.state import INT_COLUMNS, DeviceState, all_ranks, one_rank
from jaxserve.step_plan import SlotOpen, WindowGroup
from pallas_kernels.paged_attention import REFERENCE
from pallas_kernels.sampling.parameters import COUNT_MASK, SEEN_IN_PROMPT, FloatColumn, IntColumn
from tests.runtime.tiny import CAPACITY, laid_out, mesh, on_trees, opening, specs, zero_state

VOCAB = 3000
CAPACITY_LONG = msgspec.structs.replace(CAPACITY, num_slots=40, num_pages=400, max_model_len=4000)


@functools.cache
def _program(key: ProgramKey) -> Any:
    context = StepContext(laid_out(), REFERENCE, None)
    made = ProgramBuilder(context, CAPACITY_LONG, mesh(), (), specs(CAPACITY_LONG, VOCAB))
    return on_trees(made.compile(key))


@pytest.fixture
def used() -> DeviceState:
    """Return a state in which every slot has been used before."""
    rng = np.random.default_rng(0)

    def fill(x: jax.Array) -> np.ndarray:
        return rng.integers(1, 100, x.shape).astype(x.dtype)

    return jax.tree.map(fill, zero_state(CAPACITY_LONG, VOCAB))


def _open(state: DeviceState, *opened: SlotOpen) -> tuple[DeviceState, tuple[int, int]]:
    """Return the state after all calls, and how many calls of `update` and of `adjust` there were."""
    updates, adjustments = list(pack_updates(opened, CAPACITY_LONG)), list(pack_adjustments(opened))
    for key, vectors in ((UPDATE_KEY, updates), (ADJUST_KEY, adjustments)):
        for vector in vectors:
            state, _ = _program(key)((), state, vector[None])
    return jax.tree.map(np.asarray, state), (len(updates), len(adjustments))


def _row(state: DeviceState, slot: int) -> dict[str, float]:
    ints, floats = state.sampling.ints[0, slot].tolist(), state.sampling.floats[0, slot].tolist()
    named = [*zip(INT_COLUMNS, ints, strict=True), *zip(FloatColumn, floats, strict=True)]
    return {column.name.lower(): value for column, value in named}


def test_a_plain_slot_takes_one_call_and_starts_empty(used: DeviceState) -> None:
    state, calls = _open(used, opening(2, [5, 6, 7], temperature=0.0))
    assert calls == (1, 0)
    assert state.seq_lens[0, 2] == 0
    assert (state.sampling.stop_ids[0, 2] == -1).all()
    assert (state.sampling.bias_ids[0, 2] == -1).all()
    np.testing.assert_array_equal(state.counts, used.counts)  # nobody reads them


@pytest.mark.parametrize("count", [SLOTS, SLOTS + 1, 2 * SLOTS + 3])
def test_slots_share_calls(used: DeviceState, count: int) -> None:
    opens = [
        opening(39 - i, top_k=i, stop_ids=(i,), cached_pages=(tuple(range(i, 2 * i)),), num_cached_tokens=4 * i)
        for i in range(count)
    ]
    state, calls = _open(used, *opens)
    groups = [sum(range(at, min(at + SLOTS, count))) for at in range(0, count, SLOTS)]
    assert calls == (sum(-(-pages // PAGES) for pages in groups), 0)
    for i in range(count):
        row = _row(state, 39 - i)
        assert (row["top_k"], state.sampling.stop_ids[0, 39 - i, 0], state.seq_lens[0, 39 - i]) == (i, i, 4 * i)
        assert state.page_tables[0][0, 39 - i, :i].tolist() == list(range(i, 2 * i))
        np.testing.assert_array_equal(state.page_tables[0][0, 39 - i, i:], used.page_tables[0][0, 39 - i, i:])
    np.testing.assert_array_equal(state.seq_lens[0, : 40 - count], used.seq_lens[0, : 40 - count])


def test_the_sampling_row(used: DeviceState) -> None:
    seed = 0xFEDCBA9876543210 - 2**64
    opened = opening(
        1,
        [5, 6, 7],
        stop_ids=(9, 11),
        sample=3,
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=2.0,
        min_tokens=4,
        seed=seed,
        logprobs=0,
        logit_bias={3: -100.0, 250: 0.5},
    )
    state, _ = _open(used, opened)
    row = _row(state, 1)
    assert row["seed_low"] % 2**32 == seed % 2**32
    assert row["seed_high"] % 2**32 == (seed >> 32) % 2**32
    del row["seed_low"], row["seed_high"]
    assert row == {
        "top_k": 40,
        "sample": 3,
        "min_len": 7,
        "logprobs": 1,
        "fill_len": 3,
        "constrained": 0,
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 2.0,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.5,
    }
    assert state.sampling.stop_ids[0, 1].tolist() == [9, 11] + [-1] * (MAX_STOP_IDS - 2)
    assert state.sampling.bias_ids[0, 1].tolist() == [3, 250] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert state.sampling.bias_values[0, 1, :2].tolist() == [-100.0, 0.5]


def test_every_shared_option_has_a_column() -> None:
    """A request with another one would be accepted, and draw as without it."""
    assert set(SHARED_OPTIONS) <= {column.name.lower() for column in (*IntColumn, *FloatColumn)}


@pytest.mark.parametrize(("top_k", "seed"), [(-1, -1), (0, -(2**63)), (2**31 - 1, 2**63 - 1)])
def test_extreme_values_fit(used: DeviceState, top_k: int, seed: int) -> None:
    row = _row(_open(used, opening(0, top_k=top_k, seed=seed))[0], 0)
    assert row["top_k"] == max(top_k, 0)
    assert (row["seed_low"] % 2**32) + (row["seed_high"] % 2**32 << 32) == seed % 2**64
    assert row["logprobs"] == 0


def test_the_largest_bias_and_all_stop_ids_fit(used: DeviceState) -> None:
    bias = {token: token / 8 for token in range(MAX_LOGIT_BIAS)}
    state, calls = _open(used, opening(0, logit_bias=bias, stop_ids=tuple(range(MAX_STOP_IDS))))
    assert calls == (1, -(-MAX_LOGIT_BIAS // BIASES))
    np.testing.assert_array_equal(state.counts, used.counts)
    assert state.sampling.bias_ids[0, 0].tolist() == list(bias)
    assert state.sampling.bias_values[0, 0].tolist() == list(bias.values())
    assert state.sampling.stop_ids[0, 0].tolist() == list(range(MAX_STOP_IDS))


@pytest.mark.parametrize("count", [1, PAGES, PAGES + 1, 3 * PAGES])
def test_any_number_of_cached_pages(used: DeviceState, count: int) -> None:
    pages = tuple(range(100, 100 + count))
    state, calls = _open(used, opening(3, [1] * 3900, cached_pages=(pages,), num_cached_tokens=4 * count))
    assert calls == (-(-count // PAGES), 0)
    assert state.seq_lens[0, 3] == 4 * count
    assert state.page_tables[0][0, 3, :count].tolist() == list(pages)
    np.testing.assert_array_equal(state.page_tables[0][0, 3, count:], used.page_tables[0][0, 3, count:])


def test_cached_pages_of_a_window_are_the_last_ones(used: DeviceState) -> None:
    """Groups share calls, and each has columns of its own."""
    capacity = msgspec.structs.replace(CAPACITY_LONG, window_groups=(WindowGroup(30, 9), WindowGroup(9, 5)))
    groups = len(capacity.pages_by_group)
    whole = tuple(range(100, 100 + PAGES + 2))
    count = len(whole)
    opened = opening(5, cached_pages=(whole, (21, 22, 23), (8,)), num_cached_tokens=4 * count)
    tables = tuple(used.page_tables[0] + group for group in range(groups))
    state = dataclasses.replace(used, page_tables=tables)
    vectors = list(pack_updates([opened], capacity))
    assert [vector.size for vector in vectors] == [update_packing(groups).size] * 2
    for vector in vectors:
        state = all_ranks(jax.jit(update)((), one_rank(state), vector)[0])
    for group, (table, before) in enumerate(zip(state.page_tables, tables)):
        pages = opened.cached_pages[group]
        expected = before.copy()
        expected[0, 5, count - len(pages) : count] = pages
        np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("length", [1, TOKENS, 3 * TOKENS])
@pytest.mark.parametrize("count", [1, PENALIZED_SLOTS + 1])
def test_penalties_count_the_prompt_and_the_output_before(used: DeviceState, length: int, count: int) -> None:
    rng = np.random.default_rng(1)
    opens = [
        opening(
            slot, rng.integers(0, 2000, length).tolist(), rng.integers(1500, VOCAB, length // 2 + 3).tolist(),
            frequency_penalty=0.5, logit_bias={5: 1.0}, cached_pages=((7,) * 70,), num_cached_tokens=280,
        )
        for slot in range(count)
    ]  # fmt: skip
    state, calls = _open(used, *opens)
    groups = [opens[at : at + PENALIZED_SLOTS] for at in range(0, count, PENALIZED_SLOTS)]
    distinct = [sum(len({*one.prompt_ids, *one.output_ids}) for one in group) for group in groups]
    assert calls == (1, sum(-(-tokens // TOKENS) for tokens in distinct))
    for slot, opened in enumerate(opens):
        counts = state.counts[0, slot]
        np.testing.assert_array_equal(counts & COUNT_MASK, np.bincount(opened.output_ids, minlength=VOCAB))
        seen = np.bincount(opened.prompt_ids, minlength=VOCAB) > 0
        np.testing.assert_array_equal((counts & SEEN_IN_PROMPT) != 0, seen)
        assert state.page_tables[0][0, slot, :70].tolist() == [7] * 70
        assert state.sampling.bias_ids[0, slot, :2].tolist() == [5, -1]
    np.testing.assert_array_equal(state.counts[0, count:], used.counts[0, count:])


def test_other_slots_stay_unchanged(used: DeviceState) -> None:
    opened = opening(
        2, [1, 2, 3], [4], logit_bias={3: 1.0}, presence_penalty=1.0, cached_pages=((5, 6),), num_cached_tokens=8
    )
    state, _ = _open(used, opened)
    others = [slot for slot in range(40) if slot != 2]
    for before, after in zip(jax.tree.leaves(used.replace(kv=None)), jax.tree.leaves(state.replace(kv=None))):
        np.testing.assert_array_equal(after[:, others], before[:, others])
    np.testing.assert_array_equal(state.kv[0].keys, used.kv[0].keys)
    np.testing.assert_array_equal(state.last_tokens, used.last_tokens)


def test_a_rank_that_opens_no_slot_stays_unchanged(used: DeviceState) -> None:
    nothing = update_packing(1).pack({"seq_lens": [9], "page_ids_0": [3]})
    state, _ = _program(UPDATE_KEY)((), used, nothing[None])
    state, _ = _program(ADJUST_KEY)((), state, ADJUST.pack({"counts": [7], "bias_ids": [3]})[None])
    for before, after in zip(jax.tree.leaves(used), jax.tree.leaves(state)):
        np.testing.assert_array_equal(after, before)
