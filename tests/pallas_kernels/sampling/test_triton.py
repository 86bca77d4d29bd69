"""The Triton sampler, interpreted, against the CPU's kernel and plain XLA: the same tokens, however they are found.

Vocabularies are smaller than a tile, and larger than a list of candidates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.sampling import draw_tokens, reference
from pallas_kernels.sampling.parameters import DrawParameters, FloatColumn, IntColumn, SlotTable
from pallas_kernels.sampling.triton import draw, top_logits
from pallas_kernels.sampling.triton.rows import LIST, TILE

pytestmark = pytest.mark.interpreted

ROWS = 24


def slot_table(slots: jax.Array, by_slot: DrawParameters) -> SlotTable:
    """Return the table of parameters by slot."""
    ints = jnp.zeros((len(by_slot.top_k), len(IntColumn)), jnp.int32)
    floats = jnp.zeros((len(by_slot.top_k), len(FloatColumn)), jnp.float32)
    for name, value in by_slot._asdict().items():
        if name.upper() in IntColumn.__members__:
            ints = ints.at[:, IntColumn[name.upper()]].set(value)
        else:
            floats = floats.at[:, FloatColumn[name.upper()]].set(value)
    return SlotTable(slots, ints, floats)


@jax.jit
def by_triton(logits: jax.Array, keys: jax.Array, parameters: DrawParameters) -> jax.Array:
    # Slots stand in another order than rows.
    slots = jnp.arange(len(logits))[::-1]
    table = slot_table(slots, jax.tree.map(lambda x: x[::-1], parameters))
    return draw.draw_tokens(logits, None, keys, jnp.ones(len(logits), bool), table, interpret=True)


def parameters(rng: np.random.Generator, rows: int = ROWS) -> tuple[np.ndarray, DrawParameters]:
    """Random keys and parameters; many rows combine several."""
    keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
    return keys, DrawParameters(
        rng.choice([0, 0.3, 1, 1, 1, 2, 1e-6, 1e-40], rows).astype(np.float32),
        rng.choice([0, 0, 1, 7, 50, TILE + 900, LIST + 900, 10**6], rows).astype(np.int32),
        rng.choice([1, 1, 0.1, 0.5, 0.9, 0.99, 1e-9], rows).astype(np.float32),
        rng.choice([0, 0, 0, 0.05, 1], rows).astype(np.float32),
    )


def random_logits(rng: np.random.Generator, vocab: int, scale: float) -> np.ndarray:
    """Rows of which some have many equal logits, or many of -inf."""
    logits = rng.normal(0, scale, (ROWS, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2] = 0.0
    logits[3, 5:] = -np.inf
    logits[4:6, 1:][rng.random((2, vocab - 1)) < 0.5] = -np.inf
    return logits


@pytest.mark.parametrize("other", [draw_tokens, reference.draw_tokens], ids=["cpu", "xla"])
@pytest.mark.parametrize("vocab", [100, 3 * TILE + 17])
def test_it_draws_the_same_tokens(other: object, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    different = 0
    for scale in (0.3, 3.0, 10.0):
        for _ in range(3):
            given = random_logits(rng, vocab, scale), *parameters(rng)
            different += int((np.asarray(by_triton(*given)) != np.asarray(jax.jit(other)(*given))).sum())  # type: ignore[call-overload]
    assert different <= 1


@pytest.mark.grid
@pytest.mark.parametrize("vocab", [TILE, 32064, 49152, 128256, 151936])
def test_it_draws_the_same_tokens_of_real_vocabularies(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    different = 0
    for scale in (0.5, 2.0, 8.0):
        given = random_logits(rng, vocab, scale), *parameters(rng)
        different += int((np.asarray(by_triton(*given)) != np.asarray(draw_tokens(*given))).sum())
    assert different <= 1


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (0, 0.999), (LIST + 100, 1.0), (3, 1.0), (3, 0.5), (LIST + 9, 0.7)], ids=str
)
@pytest.mark.parametrize("kind", ["flat", "equal"])
def test_thresholds_are_found_in_the_row_if_too_many_tokens_may_be_kept(kind: str, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(top_k)
    keys, _ = parameters(rng)
    logits = rng.uniform(0, 0.01, (ROWS, LIST + TILE)).astype(np.float32)
    if kind == "equal":
        logits[:] = 0.0
    columns = (np.full(ROWS, value) for value in (np.float32(1), np.int32(top_k), np.float32(top_p), np.float32(0)))
    given = logits, keys, DrawParameters(*columns)
    assert (np.asarray(by_triton(*given)) != np.asarray(draw_tokens(*given))).sum() <= 1


def test_a_row_depends_on_nothing_but_itself() -> None:
    rng = np.random.default_rng(5)
    logits, given = random_logits(rng, 700, 3.0), parameters(rng)
    together = np.asarray(by_triton(logits, *given))
    order = rng.permutation(ROWS)[:7]
    np.testing.assert_array_equal(by_triton(logits[order], *jax.tree.map(lambda x: x[order], given)), together[order])


def test_rows_of_one_slot_draw_with_keys_of_their_own() -> None:
    rng = np.random.default_rng(6)
    logits, (keys, by_slot) = random_logits(rng, 700, 3.0), parameters(rng)
    slots = rng.integers(0, ROWS, 6)[np.sort(rng.integers(0, 6, ROWS))].astype(np.int32)
    live = np.arange(ROWS) != 3
    found = draw.draw_tokens(logits, None, keys, live, slot_table(slots, by_slot), interpret=True)
    expected = np.asarray(draw_tokens(logits, keys, jax.tree.map(lambda x: x[slots], by_slot)))
    np.testing.assert_array_equal(found, np.where(live, expected, 0))


@pytest.mark.parametrize("vocab", [3, 100, LIST + TILE + 5])
def test_top_logits_come_in_the_order_of_top_k(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, vocab, 3.0)
    token = rng.integers(0, vocab, ROWS).astype(np.int32)
    token[0] = vocab
    wanted = np.arange(ROWS) != 7
    count = min(20, vocab)
    found = top_logits(logits, token, wanted, top=count, normalize=False, interpret=True)
    top, ids = lax.top_k(logits, count)
    normalizer = jax.nn.logsumexp(logits, axis=1)
    chosen = np.where(token < vocab, logits[np.arange(ROWS), np.minimum(token, vocab - 1)], 0.0)
    np.testing.assert_array_equal(found.top_ids, np.where(wanted[:, None], ids, 0))
    np.testing.assert_array_equal(found.top, np.where(wanted[:, None], top, 0.0))
    np.testing.assert_array_equal(found.chosen, np.where(wanted, chosen, 0.0))
    np.testing.assert_allclose(found.normalizer, np.where(wanted, normalizer, 0.0), rtol=1e-6, atol=1e-6)
    shifted = top_logits(logits, token, wanted, top=count, normalize=True, interpret=True)
    np.testing.assert_allclose(shifted.top[0], top[0] - normalizer[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(shifted.chosen[1], chosen[1] - normalizer[1], rtol=1e-6, atol=1e-6)
