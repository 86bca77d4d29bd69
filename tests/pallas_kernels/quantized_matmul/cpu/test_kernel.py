from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cpu import call
from pallas_kernels.cpu.emit import Module
from pallas_kernels.quantized_matmul import (
    BLOCK,
    BLOCK_DTYPE,
    Bits,
    PackedWeight,
    gather_rows,
    pack_blocks,
    pack_dense,
    packed_matmul,
    packed_shape,
    unpack,
)
from pallas_kernels.quantized_matmul.cpu.kernel import PackedMatmul

pytestmark = pytest.mark.slow

BITS: list[Bits] = [4, 8, 16]


def weights(bits: Bits, out_dim: int, in_dim: int, seed: int = 0) -> tuple[PackedWeight, np.ndarray]:
    """Return a packed weight and its dense values."""
    rng = np.random.default_rng(seed)
    data = np.zeros(packed_shape(out_dim, in_dim, bits), np.uint8)
    if bits == 16:
        dense = rng.standard_normal((out_dim, in_dim)).astype(ml_dtypes.bfloat16)
        pack_dense(dense, data)
        return PackedWeight(jnp.asarray(data), (out_dim, in_dim), bits), dense.astype(np.float32)
    blocks = np.zeros((out_dim, in_dim // BLOCK), BLOCK_DTYPE)
    blocks["q"] = rng.integers(0, 2**bits, blocks["q"].shape)
    blocks["scale"] = rng.random(blocks.shape) / 2**bits
    blocks["minimum"] = -rng.random(blocks.shape)
    pack_blocks(blocks, bits, data)
    dense = blocks["q"] * blocks["scale"][..., None] + blocks["minimum"][..., None]
    return PackedWeight(jnp.asarray(data), (out_dim, in_dim), bits), dense.reshape(out_dim, in_dim).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Plain(PackedMatmul):
    """The kernel for a CPU that doesn't multiply bfloat16."""

    @property
    def name(self) -> str:
        return f"{super().name}_plain"

    def write(self, module: Module, features: frozenset[str]) -> None:
        super().write(module, frozenset())


def plain(x: jax.Array, weight: PackedWeight) -> jax.Array:
    shape = jax.ShapeDtypeStruct((len(x), weight.shape[0]), jnp.float32)
    return call(Plain(weight.bits), shape, x, weight.data)


@pytest.mark.parametrize("bits", BITS)
def test_unpacking_returns_the_packed_values(bits: Bits) -> None:
    packed, dense = weights(bits, 48, 96)
    np.testing.assert_allclose(unpack(packed), dense, rtol=1e-6, atol=1e-7)
    assert unpack(packed.reshape(3, 16, 96)).shape == (3, 16, 96)
    assert packed.reshape(3, 16, -1).shape == (3, 16, 96)


@pytest.mark.parametrize("product", [packed_matmul, plain])
@pytest.mark.parametrize("bits", BITS)
# Fewer strips than a tile, whole tiles, and a remainder; the same of rows; several items
@pytest.mark.parametrize(("tokens", "out_dim", "in_dim"), [(1, 16, 32), (4, 64, 64), (7, 80, 96), (9, 2080, 576)])
def test_it_equals_the_dense_product(product, bits: Bits, tokens: int, out_dim: int, in_dim: int) -> None:
    packed, dense = weights(bits, out_dim, in_dim)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, in_dim)), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ dense.T.astype(np.float64)
    given = jax.jit(product)(x, packed)
    assert given.dtype == jnp.float32
    np.testing.assert_allclose(given, expected, atol=2e-6 * in_dim)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_other_rows(bits: Bits) -> None:
    packed, _ = weights(bits, 320, 576)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((16, 576)), jnp.bfloat16)
    many = np.asarray(jax.jit(packed_matmul)(x, packed))
    for count in (5, 8):
        np.testing.assert_array_equal(jax.jit(packed_matmul)(x[3 : 3 + count], packed), many[3 : 3 + count])


def test_rows_of_a_packed_table_are_read() -> None:
    packed, dense = weights(16, 48, 64)
    given = jax.jit(gather_rows)(packed, jnp.asarray([0, 47, 17, 48]))
    np.testing.assert_array_equal(given.astype(jnp.float32), [dense[0], dense[47], dense[17], np.zeros(64)])


def test_a_weight_of_another_width_is_refused() -> None:
    packed, _ = weights(4, 16, 64)
    with pytest.raises(AssertionError):
        packed_matmul(jnp.zeros((1, 32), jnp.bfloat16), packed)
