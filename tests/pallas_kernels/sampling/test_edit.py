"""Edits of logits on Triton, interpreted, against numpy: also at several positions of a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.sampling.parameters import COUNT_MASK, SEEN_IN_PROMPT, Edits, FloatColumn, IntColumn, SlotTable
from pallas_kernels.sampling.triton import edit_logits
from pallas_kernels.sampling.triton.edit import _PART

pytestmark = pytest.mark.interpreted

PENALTIES = [FloatColumn.REPETITION_PENALTY, FloatColumn.FREQUENCY_PENALTY, FloatColumn.PRESENCE_PENALTY]
# Two parts; ids of the other shard come before and after those of this one.
VOCAB, FIRST, ALL = _PART + 500, 300, 2 * _PART + 3000
SLOTS, ROWS, DRAFTS = 6, 11, 5
PLAIN, PENALIZED, REPEATED, EARLY, BIASED, EVERYTHING = range(SLOTS)


def table(slots: np.ndarray) -> SlotTable:
    """Each kind of request in a slot of its own; `EARLY` ones may not stop before 40 tokens."""
    floats = np.zeros((SLOTS, len(FloatColumn)), np.float32)
    floats[:, PENALTIES] = 1, 0, 0
    floats[PENALIZED, PENALTIES] = 1, 0.7, 0.4
    floats[REPEATED, PENALTIES] = 1.5, 0, 0
    floats[EVERYTHING, PENALTIES] = 0.8, -0.3, 1.1
    ints = np.zeros((SLOTS, len(IntColumn)), np.int32)
    ints[[EARLY, EVERYTHING], IntColumn.MIN_LEN] = 40
    return SlotTable(slots, ints, floats)


def given(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Edits]:
    """Return logits, slots, lengths, live rows and edits. Rows of one slot have more and more drafts."""
    slots = np.array([EVERYTHING, EVERYTHING, EVERYTHING, PENALIZED, PENALIZED, PLAIN, REPEATED, REPEATED, EARLY,
                      EARLY, BIASED], np.int32)  # fmt: skip
    lengths = np.array([38, 39, 40, 9, 10, 50, 20, 21, 39, 40, 7], np.int32)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    counts = rng.choice([0, 0, 0, 1, 7, COUNT_MASK - 9, SEEN_IN_PROMPT, SEEN_IN_PROMPT + 3], (SLOTS, VOCAB)).astype(
        np.int16
    )
    bias_ids = np.full((SLOTS, 3), -1, np.int32)
    bias_ids[[BIASED, EVERYTHING], :2] = [[FIRST + 4, 2], [FIRST + 8, FIRST + VOCAB - 1]]
    stop_ids = np.full((SLOTS, 2), -1, np.int32)
    stop_ids[[EARLY, EVERYTHING], :] = [[FIRST + 8, ALL - 1], [FIRST + 9, FIRST + _PART]]
    values = rng.normal(0, 2, bias_ids.shape).astype(np.float32)
    pending = np.full((ROWS, DRAFTS), -1, np.int32)
    for row in range(1, ROWS):
        if slots[row] == slots[row - 1]:
            # A draft often repeats itself; some of its tokens are biased, or on another shard.
            choices = [FIRST, FIRST, FIRST + 8, FIRST + VOCAB - 1, FIRST + VOCAB, 0, int(rng.integers(0, ALL))]
            pending[row] = np.where(pending[row - 1] < 0, pending[row], pending[row - 1])
            pending[row, rng.integers(0, DRAFTS)] = rng.choice(choices)
    pending[2, :] = FIRST, FIRST + 8, FIRST, -1, FIRST + VOCAB
    live = np.arange(ROWS) != 7
    return logits, slots, lengths, live, Edits(counts, stop_ids, bias_ids, values, np.int32([FIRST]), pending)


def expected(
    logits: np.ndarray, slots: np.ndarray, lengths: np.ndarray, live: np.ndarray, edits: Edits
) -> tuple[np.ndarray, np.ndarray]:
    """Return edited logits and which rows have any, by their definition."""
    out, flags = logits.astype(np.float64), np.zeros(ROWS, np.int32)
    for row, slot in enumerate(slots):
        one = table(slots)
        repetition, frequency, presence = one.floats[slot, PENALTIES].astype(np.float64)
        stored = edits.counts[slot].astype(np.int32)
        times, seen = stored & COUNT_MASK, stored != 0
        for token in [] if edits.pending is None else np.asarray(edits.pending)[row]:
            if token >= 0 and 0 <= token - FIRST < VOCAB:
                times[token - FIRST] += 1
                seen[token - FIRST] = True
        x = out[row]
        x[seen] = np.where(x > 0, x / repetition, x * repetition)[seen]
        x -= frequency * times + presence * (times > 0)
        for token, value in zip(edits.bias_ids[slot], edits.bias_values[slot], strict=True):
            if token >= 0 and 0 <= token - FIRST < VOCAB:
                x[token - FIRST] += value
        early = lengths[row] < one.ints[slot, IntColumn.MIN_LEN]
        for token in edits.stop_ids[slot] if early else []:
            if token >= 0 and 0 <= token - FIRST < VOCAB:
                x[token - FIRST] = -np.inf
        penalized = repetition != 1 or frequency != 0 or presence != 0
        flags[row] = live[row] and (penalized or early or edits.bias_ids[slot, 0] >= 0)
    return out, flags


def check(logits: np.ndarray, slots: np.ndarray, lengths: np.ndarray, live: np.ndarray, edits: Edits) -> None:
    where = lengths, live, edits, table(slots)
    out, flags = edit_logits(logits, *where, interpret=True)
    meant, wanted = expected(logits, slots, lengths, live, edits)
    np.testing.assert_array_equal(flags, wanted)
    edited = wanted != 0
    np.testing.assert_allclose(np.asarray(out)[edited], meant[edited], rtol=1e-5, atol=1e-5)


def test_logits_are_edited_by_counts_bias_and_stop_ids() -> None:
    *arrays, edits = given(np.random.default_rng(0))
    check(*arrays, edits._replace(pending=None))


@pytest.mark.parametrize("seed", range(3))
def test_pending_tokens_count_as_output(seed: int) -> None:
    check(*given(np.random.default_rng(seed)))


def test_unused_pending_tokens_change_nothing() -> None:
    logits, slots, lengths, live, edits = given(np.random.default_rng(4))

    def run(pending: np.ndarray | None) -> np.ndarray:
        where = lengths, live, edits._replace(pending=pending), table(slots)
        out, flags = edit_logits(logits, *where, interpret=True)
        return np.asarray(out)[np.asarray(flags) != 0]

    np.testing.assert_array_equal(run(np.full((ROWS, DRAFTS), -1, np.int32)), run(None))
