"""Weights of 16 bits that are quantized as they are read: the nearest numbers, whichever windows are asked for."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.params import ParamSpec, Path, Window
from jaxserve.weights.quantized.rows import RowsOnTheFly, row_factors, row_numbers
from jaxserve.weights.source import BLOCK_ELEMENTS
from pallas_kernels.quantized_matmul import FACTORS, PackedWeight, Scheme

BF16 = np.dtype(jnp.bfloat16)
SCHEMES = (Scheme("int4", 128, zeros=True), Scheme("int4", 64), Scheme("int8", 32, zeros=True), Scheme("fp8"))


def weights(*shape: int, dtype: np.dtype) -> np.ndarray:
    """Return weights of both signs and of one, zeros of both signs, and some that are large beside their group."""
    values = np.random.default_rng(7).standard_normal(shape, np.float32)
    values[0], values[1], values[2] = np.abs(values[0]), -np.abs(values[1]), 0
    values[3, ..., ::3], values[3, ..., 1::3] = 0.0, -0.0
    values[4:, ..., ::50] *= 1000
    return values.astype(dtype)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
def test_numbers_are_the_nearest_and_reach_the_extremes_of_their_group(dtype: np.dtype, scheme: Scheme) -> None:
    values = weights(8, 256, dtype=dtype)
    factors = row_factors(values, scheme)
    grouped = values.astype(np.float32).reshape(8, -1, scheme.group or 256)
    least, greatest = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    magnitude, tiny, most = np.maximum(-least, greatest), np.finfo(np.float32).tiny, 2**scheme.bits - 1
    if scheme.numbers == "fp8":
        scale, minimum = np.maximum(magnitude / 448, tiny), np.zeros_like(magnitude)
        numbers = (grouped / scale[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        exact = (greatest - least) / most if scheme.zeros else magnitude / (most // 2)
        scale = np.maximum(exact, tiny).astype(BF16).astype(np.float32)
        zero = np.clip(np.round(-least / scale), 0, most) if scheme.zeros else np.full_like(scale, most // 2 + 1)
        minimum = -scale * zero
        numbers = np.clip(np.rint(grouped / scale[..., None]) + zero[..., None], 0, most)
    np.testing.assert_array_equal(factors["scale"], scale)
    np.testing.assert_array_equal(factors["minimum"], minimum)
    np.testing.assert_array_equal(row_numbers(values, factors, scheme), numbers.reshape(values.shape))


def test_every_float32_near_a_tie_becomes_the_nearest_fp8() -> None:
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.concatenate([numbers[:-1], (numbers[1:] + numbers[:-1]) / 2, [np.float32(448)]]).view(np.uint32)
    near = (ties[:, None] + np.arange(64, dtype=np.uint32)).view(np.float32)
    values = np.concatenate([near, -near]).clip(-448, 448)
    factors = np.ones((len(values), 1), FACTORS)
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(row_numbers(values, factors, Scheme("fp8")), expected)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_numbers_do_not_depend_on_the_windows_that_are_read(scheme: Scheme) -> None:
    """The weight has more than one piece, and two dimensions of inputs: heads of 64."""
    heads = 64
    stored = weights(6, BLOCK_ELEMENTS // (4 * heads * 64), heads, 64, dtype=BF16)
    path: Path = ("layer",)
    spec = ParamSpec(stored.shape, BF16, (None,) * 4, inputs=2)

    def fill(path: Path, spec: ParamSpec, window: Window, out: np.ndarray) -> None:
        out[...] = stored[window]

    found = RowsOnTheFly(fill, {path: spec}, {path: PackedWeight(None, scheme=scheme)})
    flat = stored.reshape(*stored.shape[:2], -1)
    factors = row_factors(flat, scheme)
    numbers = row_numbers(flat, factors, scheme)
    unit = scheme.group or 32
    per_unit = np.repeat(factors, flat.shape[-1] // unit, axis=-1) if scheme.group is None else factors
    for rows in ((slice(0, 6), slice(0, stored.shape[1])), (slice(2, 3), slice(3, 7))):
        for columns in (slice(0, 4096), slice(1024, 2048)):
            shape = [one.stop - one.start for one in (*rows, columns)]
            out = np.empty(shape, np.uint8)
            found.numbers(path, (*rows, columns), out)
            np.testing.assert_array_equal(out, numbers[*rows, columns])
            units = slice(columns.start // unit, columns.stop // unit)
            own = np.empty((*shape[:-1], units.stop - units.start), FACTORS)
            found.factors(path, (*rows, units), unit, own)
            np.testing.assert_array_equal(own, per_unit[*rows, units])
