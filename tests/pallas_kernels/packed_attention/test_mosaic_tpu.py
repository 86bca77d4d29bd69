"""The TPU kernel, interpreted, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.packed_attention import (
    BACKENDS,
    PackedOptions,
    PackedProblem,
    choose_packed_backend,
    packed_attention,
)
from pallas_kernels.target import KernelTarget
from tests.pallas_kernels.packed_attention.cases import CASES, CORNERS, Case, check, make_batch, texts_of
from tests.pallas_kernels.packed_attention.test_packed_attention import run, skip_refused
from tests.selection import grid

PROBLEM = PackedProblem(12, 12, 64, np.dtype(jnp.bfloat16))
V6E = KernelTarget("tpu", "TPU v6 lite")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", grid(CASES, lambda case: case.name in CORNERS and case.far is None), ids=str)
def test_equals_float64(case: Case) -> None:
    skip_refused(case, "mosaic_tpu")
    batch = make_batch(case)
    check(case, batch, run(batch, "mosaic_tpu"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.float16)}, "in float32 and bfloat16, not in float16"),
        ({"head_dim": 512}, "heads of up to 256, not of 512"),
        ({"has_bias": True}, "adds no biases of distances"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], reason: str) -> None:
    assert choose_packed_backend(V6E, PROBLEM).name == "mosaic_tpu"
    assert reason in (BACKENDS.refusal("mosaic_tpu", V6E, (dataclasses.replace(PROBLEM, **change),)) or "")


def test_a_program_of_too_many_tokens_is_refused() -> None:
    x = jax.ShapeDtypeStruct((50_000, 1, 256), jnp.float32)
    with pytest.raises(ValueError, match=r"up to 10240 tokens of heads of 256 in float32, not 50000: take programs of"):
        jax.eval_shape(
            lambda q, k, v: packed_attention(
                q, k, v, texts_of((5,), 0), PackedOptions(1.0), Backend("mosaic_tpu", V6E)
            ),
            *[x] * 3,
        )
