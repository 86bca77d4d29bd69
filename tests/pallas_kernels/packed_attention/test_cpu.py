"""The CPU's kernel: what it refuses, that a text's bits are its own, and what it doesn't read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_attention import BACKENDS, PackedProblem, choose_packed_backend
from pallas_kernels.target import CPU
from tests.pallas_kernels.packed_attention.cases import Batch, Case, make_batch, texts_of
from tests.pallas_kernels.packed_attention.test_packed_attention import run

PROBLEM = PackedProblem(12, 12, 32, np.dtype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.float16)}, "float32 and bfloat16, not float16"),
        ({"head_dim": 72}, "heads of 16 to 256 in steps of 16, not of 72"),
        ({"head_dim": 512}, "heads of 16 to 256 in steps of 16, not of 512"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], reason: str) -> None:
    assert choose_packed_backend(CPU, PROBLEM).name == "cpu"
    assert reason in (BACKENDS.refusal("cpu", CPU, (dataclasses.replace(PROBLEM, **change),)) or "")
    assert choose_packed_backend(CPU, dataclasses.replace(PROBLEM, **change)).name == "reference"


FORMS = [
    Case("float32", (140, 3, 70, 1, 64), heads=3, kv_heads=1, reach=40, far=9),
    Case("bf16", (140, 3, 70, 1, 64), heads=3, kv_heads=1, reach=40, far=9, dtype="bfloat16"),
    Case("bf16-dim-16", (140, 3, 70, 1, 64), head_dim=16, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_text_has_the_same_bits_in_any_company(case: Case) -> None:
    batch = make_batch(case)
    together, starts = run(batch, "cpu"), np.cumsum([0, *case.lengths])
    spans = [slice(*starts[i : i + 2]) for i in range(len(case.lengths))]

    def packed(order: list[int], padding: int) -> np.ndarray:
        """Return the output of some of the texts in another order, with other padding."""
        token = np.concatenate([np.arange(span.start, span.stop) for span in (spans[i] for i in order)])
        lengths = tuple(case.lengths[i] for i in order)
        arrays = [np.full((len(token) + padding, *x.shape[1:]), np.nan, x.dtype) for x in (batch.q, batch.k, batch.v)]
        for array, x in zip(arrays, (batch.q, batch.k, batch.v), strict=True):
            array[: len(token)] = x[token]
        out = run(Batch(*arrays, texts_of(lengths, padding), batch.options), "cpu")
        np.testing.assert_array_equal(out[: len(token)].view(np.uint8), together[token].view(np.uint8))
        return out

    packed([4, 2, 0, 3, 1], 5)
    for i in range(len(case.lengths)):
        packed([i], i)


def test_padding_is_zero() -> None:
    case = Case("", (5,))
    assert not run(make_batch(case), "cpu")[5:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_far_beyond_the_reach_are_not_read(dtype: str) -> None:
    """So the cost of a long text follows the reach, not its length."""
    case = Case("", (448,), reach=10, dtype=dtype)
    batch = make_batch(case)
    for x in (batch.k, batch.v):
        x[256:] = np.nan
    out = run(batch, "cpu")
    assert np.isfinite(out[:128].astype(np.float32)).all()
    assert np.isnan(out[256:].astype(np.float32)).all()
