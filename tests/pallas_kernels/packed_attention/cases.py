"""The table of cases that every backend passes, and the arrays of a case. Padding tokens are NaN."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed_attention import PackedOptions, PackedProblem, Texts
from tests.pallas_kernels.packed_attention.naive import attention

NUM_TOKENS = 448


@dataclasses.dataclass(frozen=True)
class Case:
    """Texts of these lengths, and how they attend. With `far`, each head has a bias for distances up to that."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"
    reach: int | None = None
    soft_cap: float | None = None
    far: int | None = None
    num_tokens: int = NUM_TOKENS
    spare_texts: int = 3
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def problem(self) -> PackedProblem:
        """The facts by which a backend refuses."""
        dtype = jnp.dtype(self.dtype)
        return PackedProblem(self.heads, self.kv_heads, self.head_dim, dtype, has_bias=self.far is not None)

    @property
    def live(self) -> int:
        """The tokens of all texts."""
        return sum(self.lengths)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of `packed_attention`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    texts: Texts
    options: PackedOptions


def texts_of(lengths: tuple[int, ...], spare: int) -> Texts:
    """Return texts of these lengths, and `spare` ones without tokens after them."""
    starts = np.cumsum([0, *lengths, *[0] * spare]).astype(np.int32)
    return Texts(starts, np.int32(len(lengths)))


def make_batch(case: Case) -> Batch:
    """Return random arrays of a case. Logits are large enough that a softmax needs its peak."""
    rng = np.random.default_rng(case.seed)

    def tokens(heads: int, size: float) -> np.ndarray:
        x = rng.standard_normal((case.num_tokens, heads, case.head_dim), dtype=np.float32) * size
        x[case.live :] = np.nan
        return x.astype(jnp.dtype(case.dtype))

    q, k, v = tokens(case.heads, 4), tokens(case.kv_heads, 1), tokens(case.kv_heads, 1)
    bias = None
    if case.far is not None:
        bias = jnp.asarray(rng.standard_normal((case.heads, 2 * case.far + 1), dtype=np.float32))
    options = PackedOptions(case.head_dim**-0.5, case.reach, case.soft_cap, bias)
    return Batch(q, k, v, texts_of(case.lengths, case.spare_texts), options)


def check(case: Case, batch: Batch, out: np.ndarray) -> None:
    """Assert that the output of the texts is right."""
    assert out.dtype == batch.q.dtype
    assert out.shape == batch.q.shape
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-5
    options = batch.options
    bias = None if options.distance_bias is None else np.asarray(options.distance_bias)
    of_texts = options.scale, options.reach, options.soft_cap, bias
    expected = attention(batch.q, batch.k, batch.v, case.lengths, *of_texts)
    with np.errstate(invalid="ignore"):  # where nothing was written
        found = out[: case.live].astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# Shorter and longer than a vector, a block and a tile, and as long
_LENGTHS = (16, 1, 64, 15, 65, 2, 128, 33)
_LONG = (300, 20, 100)

CASES = [
    Case("texts", _LENGTHS),
    Case("minilm", (128, 7, 130, 40), heads=12, kv_heads=12),
    Case("one-token-texts", (1,) * 40),
    Case("one-long-text", (447,)),
    Case("no-padding", (257, 191), spare_texts=0),
    Case("nothing-live", ()),
    Case("reach", _LONG, reach=16),
    Case("reach-1", _LENGTHS, reach=1),
    Case("reach-of-several-blocks", _LONG, reach=100, head_dim=64),
    Case("reach-longer-than-texts", _LENGTHS, reach=500),
    Case("soft-cap", _LENGTHS, soft_cap=2.0),
    Case("bias", _LONG, far=8),
    Case("bias-longer-than-texts", _LONG, far=500, head_dim=64),
    Case("bias-reach-and-group", _LONG, heads=4, far=40, reach=70, soft_cap=5.0),
    Case("gemma", (200, 31, 140), heads=3, kv_heads=1, head_dim=256, reach=20),
    Case("group-4", _LENGTHS, heads=8, kv_heads=2, head_dim=64),
    Case("group-7", _LONG, heads=7, kv_heads=1, reach=33),
    Case("dim-16", _LENGTHS, head_dim=16),
    Case("dim-80", _LENGTHS, head_dim=80),
    Case("bf16", _LENGTHS, dtype="bfloat16"),
    Case("bf16-dim-16", _LENGTHS, dtype="bfloat16", head_dim=16),
    Case("bf16-one-token-texts", (1,) * 40, dtype="bfloat16", head_dim=64),
    Case("bf16-gemma", (200, 31, 140), dtype="bfloat16", heads=3, kv_heads=1, head_dim=256, reach=20),
    Case("bf16-everything", _LONG, dtype="bfloat16", heads=4, far=40, reach=70, soft_cap=5.0),
    Case("bf16-everything-dim-48", _LONG, dtype="bfloat16", heads=4, far=40, reach=70, soft_cap=5.0, head_dim=48),
]

CORNERS = ("texts", "bias-reach-and-group", "bf16-gemma")
"""Cases for backends that are slow here."""
MORE = (
    *("one-long-text", "reach-1", "reach-longer-than-texts", "soft-cap", "bias", "group-7", "dim-80"),
    *("bf16-one-token-texts", "bf16-everything-dim-48"),
)
"""Cases that `make test` leaves out on every backend."""
