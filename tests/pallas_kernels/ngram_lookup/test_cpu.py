"""The kernel of a CPU leaves the arrays that the reference leaves, and programs for a CPU have it in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.ngram_lookup import NgramIndex, NgramLookup, cpu, propose, reference

MAX_TOKENS = 48


def _empty(lookup: NgramLookup, slots: int, entries: int) -> tuple[NgramIndex, jax.Array, jax.Array]:
    table = (slots, len(lookup.sizes), entries)
    index = NgramIndex(
        history=jnp.zeros((slots, MAX_TOKENS), jnp.int32),
        lengths=jnp.zeros(slots, jnp.int32),
        namespaces=jnp.arange(slots, dtype=jnp.int32) % 2 - 1,
        own=jnp.zeros(table, jnp.int32),
        shared=jnp.zeros(table, jnp.uint32),
    )
    return index, jnp.full((slots, lookup.max_drafts), -7, jnp.int32), jnp.full(slots, -7, jnp.int32)


def _random_tokens(rng: np.random.Generator, lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Return up to `most` tokens of each row, in any order, and the slots to draft for: some of all are invalid.

    New tokens follow the known ones or overwrite the last of them, and some lie past the end of the history.
    """
    slots = len(lengths)
    rows = rng.permutation([*range(slots), slots, slots + 3])
    live = (rng.random(len(rows)) < 0.8)[:, None] & (np.arange(most) < rng.integers(1, most + 1, len(rows))[:, None])
    token_slots = np.where(live, rows[:, None], rng.choice([-1, slots], live.shape))
    first = np.maximum(np.r_[lengths, [0] * 4][rows] - (rng.random(len(rows)) < 0.1), 0)
    positions = first[:, None] + np.arange(most)
    # With few tokens to draw from, long n-grams occur again.
    tokens = rng.integers(0, rng.choice([2, 3, 40, 2**31 - 1]), live.shape)
    order = rng.permutation(live.size)
    return [x.astype(np.int32) for x in (*(x.ravel()[order] for x in (token_slots, positions, tokens)), rows)]


def _expected(
    index: NgramIndex, drafts: Any, counts: Any, slots: Any, positions: Any, tokens: Any, rows: Any, lookup: NgramLookup
) -> tuple[NgramIndex, jax.Array, jax.Array]:
    """Return what the reference leaves where the last n-gram of an entry is stored: each token is added once more."""
    index = reference.remember(index, slots, positions, tokens, lookup)
    each = tuple(x[:, None] for x in (slots, positions, tokens))
    index, _ = lax.scan(lambda index, token: (reference.remember(index, *token, lookup), None), index, each)
    return reference.propose(index, drafts, counts, *(x[-1] for x in each), rows, lookup)


@pytest.mark.parametrize(
    ("lookup", "slots", "entries", "most"),
    [
        (NgramLookup(max_drafts=7, longest=4, shortest=2), 4, 64, 1),
        (NgramLookup(max_drafts=7, longest=4, shortest=2), 3, 64, 8),
        (NgramLookup(max_drafts=3, longest=3, shortest=1), 6, 5, 4),
        (NgramLookup(max_drafts=16, longest=3, shortest=3), 1, 256, 17),
    ],
)
def test_all_arrays_are_those_of_the_reference(lookup: NgramLookup, slots: int, entries: int, most: int) -> None:
    rng = np.random.default_rng(entries + most)
    kernel, expected = (jax.jit(functools.partial(f, lookup=lookup)) for f in (cpu.propose, _expected))
    found, seen = _empty(lookup, slots, entries), set()
    for _ in range(150):
        # Full slots get a new sequence, whose tables still have the n-grams of the last one.
        index, drafts, counts = found
        lengths = np.where(index.lengths == MAX_TOKENS, rng.integers(0, 3, slots), index.lengths).astype(np.int32)
        state = NgramIndex(index.history, jnp.asarray(lengths), index.namespaces, index.own, index.shared)
        arguments = state, drafts, counts, *_random_tokens(rng, lengths, most)
        found = kernel(*arguments)
        jax.tree.map(np.testing.assert_array_equal, found, expected(*arguments))
        seen |= set(np.asarray(found[2]).tolist())
    assert seen >= {0, lookup.max_drafts}
    assert len(seen) > 2 or slots == 1


def _lowered(platform: str) -> Any:
    """Return a program that has its state with a leading axis, as those of `jaxserve` have."""
    lookup = NgramLookup(max_drafts=7, longest=4, shortest=2)
    state = jax.tree.map(lambda x: x[None], _empty(lookup, 4, 64))
    calls = [jnp.zeros(2, jnp.int32)] * 4

    def program(state: Any, *calls: Any) -> Any:
        own = jax.tree.map(lambda x: x.reshape(x.shape[1:]), state)
        return jax.tree.map(lambda x: x.reshape(1, *x.shape), propose(*own, *calls, lookup))

    return jax.jit(program, donate_argnums=0).trace(state, *calls).lower(lowering_platforms=(platform,))


def test_a_program_for_a_cpu_calls_the_kernel_and_copies_no_array() -> None:
    text = _lowered("cpu").compile().as_text()
    assert "llvm_propose_by_ngrams_2_to_4" in text
    assert " copy(" not in text


def test_a_program_for_another_device_has_no_kernel() -> None:
    assert "llvm_" not in _lowered("cuda").as_text()
