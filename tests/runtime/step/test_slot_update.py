"""Opening a slot sets its state, with any number of updates, and leaves other slots unchanged."""

from __future__ import annotations

import functools
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxserve.runtime.step.slot_update import PAGES, TOKENS, UPDATE, pack_open
from jaxserve.runtime.step.state import COUNT_MASK, FLOATS, INTS, SEEN_IN_PROMPT, DeviceState
from jaxserve.runtime.step.step import make_update
from jaxserve.step_plan import SlotOpen
from tests.runtime.tiny import CAPACITY, mesh, opening, specs, zero_state

VOCAB = 258
CAPACITY_LONG = msgspec.structs.replace(CAPACITY, num_pages=400, max_model_len=1200)


@functools.cache
def _program() -> Any:
    return jax.jit(make_update(mesh(), specs(CAPACITY_LONG)))


@pytest.fixture
def used() -> DeviceState:
    """Return a state in which every slot has been used before."""
    rng = np.random.default_rng(0)

    def fill(x: jax.Array) -> np.ndarray:
        return rng.integers(1, 100, x.shape).astype(x.dtype)

    return jax.tree.map(fill, zero_state(CAPACITY_LONG))


def _open(state: DeviceState, opened: SlotOpen) -> tuple[DeviceState, int]:
    vectors = list(pack_open(opened))
    for vector in vectors:
        state = _program()(state, vector[None])
    return jax.tree.map(np.asarray, state), len(vectors)


def _row(state: DeviceState, slot: int) -> dict[str, float]:
    ints, floats = state.sampling.ints[0, slot].tolist(), state.sampling.floats[0, slot].tolist()
    return dict(zip(INTS, ints)) | dict(zip(FLOATS, floats))


def test_a_plain_slot_takes_one_update_and_starts_empty(used: DeviceState) -> None:
    state, updates = _open(used, opening(2, [5, 6, 7], temperature=0.0))
    assert updates == 1
    assert state.seq_lens[0, 2] == 0
    assert not state.counts[0, 2].any()
    assert (state.sampling.stop_ids[0, 2] == -1).all()
    assert (state.sampling.bias_ids[0, 2] == -1).all()


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
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 2.0,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.5,
    }
    assert state.sampling.stop_ids[0, 1].tolist() == [9, 11] + [-1] * (MAX_STOP_IDS - 2)
    assert state.sampling.bias_ids[0, 1].tolist() == [3, 250] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert state.sampling.bias_values[0, 1].tolist() == [-100.0, 0.5] + [0.0] * (MAX_LOGIT_BIAS - 2)


@pytest.mark.parametrize(("top_k", "seed"), [(-1, -1), (0, -(2**63)), (2**31 - 1, 2**63 - 1)])
def test_extreme_values_fit(used: DeviceState, top_k: int, seed: int) -> None:
    row = _row(_open(used, opening(0, top_k=top_k, seed=seed))[0], 0)
    assert row["top_k"] == max(top_k, 0)
    assert (row["seed_low"] % 2**32) + (row["seed_high"] % 2**32 << 32) == seed % 2**64
    assert row["logprobs"] == 0


def test_the_largest_bias_and_all_stop_ids_fit(used: DeviceState) -> None:
    bias = {token: token / 8 for token in range(MAX_LOGIT_BIAS)}
    state, updates = _open(used, opening(0, logit_bias=bias, stop_ids=tuple(range(MAX_STOP_IDS))))
    assert updates == 1
    assert state.sampling.bias_ids[0, 0].tolist() == list(bias)
    assert state.sampling.bias_values[0, 0].tolist() == list(bias.values())
    assert state.sampling.stop_ids[0, 0].tolist() == list(range(MAX_STOP_IDS))


@pytest.mark.parametrize("count", [1, PAGES, PAGES + 1, 3 * PAGES])
def test_any_number_of_cached_pages(used: DeviceState, count: int) -> None:
    pages = tuple(range(100, 100 + count))
    state, updates = _open(used, opening(3, [1] * 1100, cached_pages=(pages,), num_cached_tokens=4 * count))
    assert updates == -(-count // PAGES)
    assert state.seq_lens[0, 3] == 4 * count
    assert state.page_tables[0, 3, :count].tolist() == list(pages)
    np.testing.assert_array_equal(state.page_tables[0, 3, count:], used.page_tables[0, 3, count:])


@pytest.mark.parametrize("length", [1, TOKENS, 2 * TOKENS + 100])
def test_penalties_count_the_prompt_and_the_output_before(used: DeviceState, length: int) -> None:
    rng = np.random.default_rng(1)
    prompt, outputs = rng.integers(0, 200, length).tolist(), rng.integers(100, 258, length // 2 + 3).tolist()
    opened = opening(1, prompt, outputs, frequency_penalty=0.5, cached_pages=((7,) * 70,), num_cached_tokens=280)
    state, updates = _open(used, opened)
    assert updates == 2 + -(-len(prompt) // TOKENS) + -(-len(outputs) // TOKENS)
    counts = state.counts[0, 1]
    np.testing.assert_array_equal(counts & COUNT_MASK, np.bincount(outputs, minlength=VOCAB))
    np.testing.assert_array_equal((counts & SEEN_IN_PROMPT) != 0, np.bincount(prompt, minlength=VOCAB) > 0)
    assert state.page_tables[0, 1, :70].tolist() == [7] * 70


def test_other_slots_stay_unchanged(used: DeviceState) -> None:
    opened = opening(2, [1, 2, 3], [4], presence_penalty=1.0, cached_pages=((5, 6),), num_cached_tokens=8)
    state, _ = _open(used, opened)
    others = [0, 1, 3]
    for before, after in zip(jax.tree.leaves(used.replace(kv=None)), jax.tree.leaves(state.replace(kv=None))):
        np.testing.assert_array_equal(after[:, others], before[:, others])
    np.testing.assert_array_equal(state.kv.keys, used.kv.keys)
    np.testing.assert_array_equal(state.last_tokens, used.last_tokens)


def test_a_rank_that_opens_no_slot_stays_unchanged(used: DeviceState) -> None:
    state = _program()(used, UPDATE.pack({"slot": [-1], "seq_len": [9], "reset": [1], "pages": [3]})[None])
    for before, after in zip(jax.tree.leaves(used), jax.tree.leaves(state)):
        np.testing.assert_array_equal(after, before)
