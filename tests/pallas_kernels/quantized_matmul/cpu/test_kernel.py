from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cpu import call, cpu_features
from pallas_kernels.quantized_matmul import (
    BLOCK,
    FACTORS,
    PackedWeight,
    Scheme,
    gather_rows,
    pack_dense,
    pack_numbers,
    packed_shape,
    quantized_matmul,
    unpack,
)
from pallas_kernels.quantized_matmul.cpu.amx_numbers import TileProducts
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul
from pallas_kernels.quantized_matmul.cpu.layout import BITS, INTEGERS, Format
from pallas_kernels.quantized_matmul.cpu.reorder import reorder_inputs
from pallas_kernels.quantized_matmul.layout import FP4_VALUES
from tests.pallas_kernels.quantized_matmul.cpu.paths import Emulated, EmulatedTiles, Integers, Plain
from tests.selection import grid

pytestmark = pytest.mark.slow

FORMATS: list[Format] = ["int4", "int8", "fp4", "fp8", "bf16"]


def weights(format: Format, out_dim: int, in_dim: int, **changes: Any) -> tuple[PackedWeight, np.ndarray]:
    """Return a packed weight and its dense values."""
    rng = np.random.default_rng(0)
    data = np.zeros(packed_shape(out_dim, in_dim, format), np.uint8)
    if format == "bf16":
        dense = rng.standard_normal((out_dim, in_dim)).astype(ml_dtypes.bfloat16)
        pack_dense(dense, data)
        return PackedWeight(jnp.asarray(data)), dense.astype(np.float32)
    factors = np.zeros((out_dim, in_dim // BLOCK), FACTORS)
    factors["scale"] = rng.random(factors.shape) / 2 ** BITS[format]
    if format == "fp8":
        q = rng.standard_normal((out_dim, in_dim)) * np.exp2(rng.integers(-9, 7, (out_dim, in_dim)))
        numbers = q.astype(ml_dtypes.float8_e4m3fn)
        values = numbers.astype(np.float32)
    elif format == "fp4":
        numbers = rng.integers(0, 16, (out_dim, in_dim)).astype(np.uint8)
        values = FP4_VALUES[numbers]
    else:
        numbers = rng.integers(0, 16 if format == "int4" else 256, (out_dim, in_dim)).astype(np.uint8)
        values = numbers.astype(np.float32)
        factors["minimum"] = -rng.random(factors.shape)
    pack_numbers(numbers.view(np.uint8), factors, format, data)
    scale, minimum = (np.repeat(factors[name], BLOCK, axis=1) for name in ("scale", "minimum"))
    scheme = dataclasses.replace(Scheme(format, BLOCK, zeros=format in INTEGERS), **changes)
    return PackedWeight(jnp.asarray(data), scheme=scheme), values * scale + minimum


@dataclasses.dataclass(frozen=True)
class PlainMatmul(Plain, PackedMatmul):
    pass


@dataclasses.dataclass(frozen=True)
class EmulatedMatmul(Emulated, PackedMatmul):
    pass


@dataclasses.dataclass(frozen=True)
class IntegerMatmul(Integers, PackedMatmul):
    pass


@dataclasses.dataclass(frozen=True)
class EmulatedTilesMatmul(EmulatedTiles, PackedMatmul):
    pass


def plain(
    x: jax.Array,
    weight: PackedWeight,
    kernel: type[PackedMatmul] = PlainMatmul,
    *,
    out_dtype: Any = jnp.float32,
    num_rows: Any = None,
) -> jax.Array:
    shape = jax.ShapeDtypeStruct((len(x), weight.shape[0]), out_dtype)
    num_rows = jnp.int32(len(x)) if num_rows is None else num_rows
    return call(kernel(weight.format, rounds=out_dtype == jnp.bfloat16), shape, x, weight.data, num_rows)


def bf16(x: jax.Array, weight: PackedWeight, **options: Any) -> jax.Array:
    return plain(x, weight, EmulatedMatmul, **options)


def integers(x: jax.Array, weight: PackedWeight, **options: Any) -> jax.Array:
    return plain(x, weight, IntegerMatmul, **options)


def tiles(x: jax.Array, weight: PackedWeight, **options: Any) -> jax.Array:
    return plain(x, weight, EmulatedTilesMatmul, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_unpacking_returns_the_packed_values(format: Format) -> None:
    packed, dense = weights(format, 48, 96)
    np.testing.assert_allclose(unpack(packed), dense, rtol=1e-6, atol=1e-7)
    inner = dataclasses.replace(packed, inner=(8,))
    assert inner.shape == unpack(inner).shape == (6, 8, 96)
    assert inner.reshape(48, -1).shape == (48, 96)
    outer = dataclasses.replace(packed, data=packed.data.reshape(3, 1, *packed.data.shape[1:]))
    assert outer.shape == (3, 16, 96)
    np.testing.assert_array_equal(unpack(outer.reshape(48, 96)), unpack(packed))


PRODUCTS = [quantized_matmul, plain, bf16, integers, tiles]
# Fewer strips than a tile, whole tiles, and a remainder; the same of rows; several items; several panels
SHAPES = [(1, 16, 32), (19, 2080, 576), (4, 64, 64), (7, 80, 96), (12, 48, 352), (139, 144, 64)]


def _is_quick(case: tuple[Any, Format, tuple[int, int, int]]) -> bool:
    """Two shapes for each product and format, and each of the others for some pairs."""
    product, format, shape = case
    pair, place = PRODUCTS.index(product) + FORMATS.index(format), SHAPES.index(shape)
    return place < 2 or pair % len(FORMATS) == place - 2


@pytest.mark.parametrize(("product", "format", "shape"), grid(itertools.product(PRODUCTS, FORMATS, SHAPES), _is_quick))
def test_it_equals_the_dense_product(product, format: Format, shape: tuple[int, int, int]) -> None:
    tokens, out_dim, in_dim = shape
    packed, dense = weights(format, out_dim, in_dim)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, in_dim)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ dense.T.astype(np.float64)
    in_16_bits = functools.partial(product, out_dtype=jnp.bfloat16)
    given, rounded = jax.jit(lambda *arguments: (product(*arguments), in_16_bits(*arguments)))(x, packed)
    assert given.dtype == jnp.float32
    np.testing.assert_allclose(given, expected, atol=2e-6 * in_dim * max(1, np.abs(dense).max() / 4))
    np.testing.assert_array_equal(rounded, given.astype(jnp.bfloat16))


@pytest.mark.parametrize("product", [quantized_matmul, tiles])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_other_rows(product: Any, format: Format) -> None:
    packed, _ = weights(format, 320, 576)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((40, 576)), jnp.bfloat16)
    many = np.asarray(jax.jit(product)(x, packed))
    for count in (1, 5, 12, 17):
        np.testing.assert_array_equal(jax.jit(product)(x[3 : 3 + count], packed), many[3 : 3 + count])


@pytest.mark.parametrize("kernel", [PackedMatmul, EmulatedTilesMatmul])
@pytest.mark.parametrize("format", FORMATS)
def test_only_needed_rows_are_written(kernel: type[PackedMatmul], format: Format) -> None:
    """The others still have what was in the memory of the result before: here that of a further operand."""
    packed, _ = weights(format, 320, 64)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((40, 64)), jnp.bfloat16)
    shape = jax.ShapeDtypeStruct((40, 320), jnp.float32)
    multiply = jax.jit(lambda *operands: call(kernel(format), shape, *operands, in_place={3: 0}))
    many = multiply(x, packed.data, jnp.int32(40), jnp.zeros((40, 320)))
    for count in (1, 5, 17):
        given = multiply(x, packed.data, jnp.int32(count), jnp.full((40, 320), 7.0))
        np.testing.assert_array_equal(given[:count], many[:count])
        assert (given[count:] == 7).all()


@pytest.mark.parametrize("format", FORMATS)
def test_tile_registers_sum_in_the_order_of_the_manual(format: Format) -> None:
    if not isinstance(PackedMatmul(format).products(cpu_features()), TileProducts):
        pytest.skip("this CPU has no tile registers")
    packed, _ = weights(format, 80, 576)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((21, 576)) * np.exp2(rng.integers(-30, 30, (21, 576))), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(quantized_matmul)(x, packed), jax.jit(tiles)(x, packed))


@pytest.mark.parametrize("format", INTEGERS)
def test_integers_multiply_inputs_rounded_to_15_bits_of_the_largest_of_a_block(format: Format) -> None:
    packed, dense = weights(format, 48, 96)
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((9, 96)) * np.exp2(rng.integers(-30, 30, (9, 96)))).astype(ml_dtypes.bfloat16)
    x[1], x[2, :32], x[3, 32:64] = 0, 1e-39, 1e34
    blocks = x.astype(np.float64).reshape(9, 3, 32)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True), 2.0**-112))) - 14)
    expected = (np.round(blocks / unit) * unit).reshape(9, 96) @ dense.T.astype(np.float64)
    given = np.asarray(jax.jit(integers)(jnp.asarray(x), packed))
    most = np.abs(blocks).reshape(9, 96) @ np.abs(dense).T
    np.testing.assert_array_less(np.abs(given - expected), 1e-6 * most + 1e-45)


@pytest.mark.parametrize("format", INTEGERS)
@pytest.mark.parametrize("product", [quantized_matmul, plain, integers])
def test_a_row_whose_inputs_are_not_finite_gives_none_that_is(product: Any, format: Format) -> None:
    packed, _ = weights(format, 48, 96)
    x = jnp.ones((3, 96), jnp.bfloat16).at[1, 40].set(jnp.nan).at[2, 40].set(jnp.inf)
    finite = np.isfinite(jax.jit(product)(x, packed))
    np.testing.assert_array_equal(finite, [[True] * 48, [False] * 48, [False] * 48])


@pytest.mark.parametrize(
    ("format", "activations"),
    [("int8", "token"), ("int8", "static"), ("fp8", "token"), ("fp8", "static"), ("fp8", "group")],
)
def test_inputs_are_quantized_as_the_scheme_asks(format: Format, activations: Any) -> None:
    packed, dense = weights(format, 48, 256, activations=activations, group=128)
    packed = dataclasses.replace(
        packed, input_scale=jnp.full(1, 0.02, jnp.float32) if activations == "static" else None
    )
    x = np.asarray(np.random.default_rng(1).standard_normal((5, 256)) * 3, ml_dtypes.bfloat16).astype(np.float32)
    x[2] = 0
    largest = 127 if format == "int8" else 448
    groups = x.reshape(5, -1, 128 if activations == "group" else 256)
    scale = np.float32(0.02) if activations == "static" else np.abs(groups).max(-1, keepdims=True) / np.float32(largest)
    scaled = np.clip(groups / np.maximum(scale, 1e-10), -largest, largest)
    q = np.round(scaled) if format == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    expected = (q * np.float64(scale)).reshape(5, 256) @ dense.T.astype(np.float64)
    given = jax.jit(quantized_matmul)(jnp.asarray(x, jnp.bfloat16), packed)
    np.testing.assert_allclose(given, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_inputs_are_put_in_an_order(tokens: int) -> None:
    """The most rows are several items."""
    order = np.random.default_rng(2).permutation(96).astype(np.int32)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, 96)), jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(reorder_inputs)(x, order), np.asarray(x)[:, order])


def test_inputs_are_put_in_the_order_of_the_numbers() -> None:
    packed, dense = weights("int4", 32, 64)
    order = np.random.default_rng(2).permutation(64).astype(np.int32)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 64)), jnp.bfloat16)
    given = jax.jit(quantized_matmul)(x, dataclasses.replace(packed, order=jnp.asarray(order)))
    np.testing.assert_allclose(given, np.asarray(x, np.float64)[:, order] @ dense.T, atol=1e-4)


def test_rows_of_a_packed_table_are_read() -> None:
    packed, dense = weights("bf16", 48, 64)
    given = jax.jit(gather_rows)(packed, jnp.asarray([0, 47, 17, 48]))
    np.testing.assert_array_equal(given.astype(jnp.float32), [dense[0], dense[47], dense[17], np.zeros(64)])


def test_a_weight_of_another_width_is_refused() -> None:
    packed, _ = weights("int4", 16, 64)
    with pytest.raises(AssertionError):
        quantized_matmul(jnp.zeros((1, 32), jnp.bfloat16), packed)
