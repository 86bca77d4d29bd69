"""The Triton kernel, interpreted, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_attention import BACKENDS, PackedProblem, choose_packed_backend
from pallas_kernels.target import KernelTarget
from tests.pallas_kernels.packed_attention.cases import CASES, CORNERS, Case, check, make_batch
from tests.pallas_kernels.packed_attention.test_packed_attention import run
from tests.selection import grid

PROBLEM = PackedProblem(12, 12, 64, np.dtype(jnp.bfloat16), has_bias=True)
H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0))


@pytest.mark.interpreted
@pytest.mark.parametrize("case", grid(CASES, lambda case: case.name in CORNERS), ids=str)
def test_equals_float64(case: Case) -> None:
    batch = make_batch(case)
    check(case, batch, run(batch, "triton"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.int8)}, "in float32, bfloat16, float16, not in int8"),
        ({"head_dim": 20}, "heads of 16 to 256 in steps of 8, not of 20"),
        ({"head_dim": 512}, "heads of 16 to 256 in steps of 8, not of 512"),
        ({"heads": 34, "kv_heads": 2}, "up to 16 query heads a KV head, not 34 for 2"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], reason: str) -> None:
    assert choose_packed_backend(H200, PROBLEM).name == "triton"
    assert reason in (BACKENDS.refusal("triton", H200, (dataclasses.replace(PROBLEM, **change),)) or "")
