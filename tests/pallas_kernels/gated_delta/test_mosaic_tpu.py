"""The TPU kernels, interpreted, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import BACKENDS, DeltaProblem, choose_backend
from pallas_kernels.target import KernelTarget
from tests.pallas_kernels.gated_delta.cases import CASES, CORNERS, Case, check, make_batch
from tests.pallas_kernels.gated_delta.test_gated_delta import run
from tests.selection import grid

PROBLEM = DeltaProblem(16, 32, 128, 128, 4, np.dtype(jnp.bfloat16))
V6E = KernelTarget("tpu", "TPU v6 lite")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", grid(CASES, lambda case: case.name in CORNERS), ids=str)
def test_equals_a_loop_over_tokens(case: Case) -> None:
    case = dataclasses.replace(case, key_dim=128, value_dim=128)
    batch = make_batch(case)
    check(case, batch, *run(case, batch, "mosaic_tpu"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": np.dtype(np.float16)}, "in float32 and bfloat16, not in float16"),
        ({"key_dim": 64}, "keys of a multiple of 128 numbers, not of 64"),
        ({"value_dim": 192}, "values of a multiple of 128 numbers, not of 192"),
        ({"value_heads": 256}, "states of up to 6 MiB, and 256 heads take 16: split the heads among more devices"),
    ],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], reason: str) -> None:
    assert choose_backend(V6E, PROBLEM).name == "mosaic_tpu"
    assert reason in (BACKENDS.refusal("mosaic_tpu", V6E, (dataclasses.replace(PROBLEM, **change),)) or "")
