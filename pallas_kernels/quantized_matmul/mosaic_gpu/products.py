"""A warpgroup's products of one block of inputs in shared memory; the kernels of weights and of experts share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS, Unpacking

# jax's annotations hide the first and declare the others abstract.
ACCUMULATOR: Any = plgpu.WGMMAAccumulatorRef
_TilingTransform: Any = plgpu.TilingTransform
_SwizzleTransform: Any = plgpu.SwizzleTransform

TILE = plgpu.Layout.WGMMA
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
# The layout for stores of single numbers, as neighbours in registers belong to different tokens.
SCALARS = plgpu.Layout._WGMMA_ACC_32BIT

# Words of a row that are copied at a time: without a swizzle, rows of this size have no bank conflicts.
_COPIED_WORDS = 16


class StagedOperands(NamedTuple):
    """The operands of products, in shared memory, or their scratch types.

    `x`: `[stages, block / chunk, tokens, chunk]`, `numbers`: `[stages, copies, outputs, copied]`. The interpreter,
    which can't multiply from registers, needs `unpacked`: `[warpgroups, 64, unit]`.
    """

    x: Any
    numbers: Any
    unpacked: Any


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of blocks of `block` inputs of `tokens` tokens, of which `chunk` inputs lie together.

    `group` neighbouring inputs of an output share a scale. Without `unpacking`, the numbers are what the tensor cores
    multiply.
    """

    tokens: int
    block: int
    chunk: int
    group: int
    unpacking: Unpacking | None
    interpret: bool

    @property
    def part(self) -> int:
        """Inputs whose products are summed before they are scaled."""
        return min(self.group, self.block)

    @property
    def parts(self) -> int:
        """The parts of a block."""
        return self.block // self.part

    @property
    def unit(self) -> int:
        """Inputs of one product."""
        return self.unpacking.inputs if self.unpacking else self.part

    @property
    def copied(self) -> int:
        """The numbers of a row, or words of numbers, that are copied at a time."""
        return _COPIED_WORDS if self.unpacking else self.block

    @property
    def copies(self) -> int:
        """The copies of a row's part in a block."""
        return self.block * self.unpacking.bits // 32 // _COPIED_WORDS if self.unpacking else 1

    def smem(self, *shape: int, dtype: Any) -> Any:
        """Return shared memory for an operand of the tensor cores."""
        size = jnp.dtype(dtype).itemsize
        swizzle = plgpu.find_swizzle(math.gcd(shape[-1], min(self.unit, 128 // size)) * size * 8)
        return plgpu.SMEM(shape, dtype, transforms=(_TilingTransform((8, swizzle // size)), _SwizzleTransform(swizzle)))

    def operands(self, stages: int, warpgroups: int, x_dtype: Any, stored: Any) -> StagedOperands:
        """Return the scratch types of the operands of a program's warpgroups."""
        numbers = stages, self.copies, warpgroups * TILE_ROWS, self.copied
        keeps = self.unpacking and self.interpret
        return StagedOperands(
            self.smem(stages, self.block // self.chunk, self.tokens, self.chunk, dtype=x_dtype),
            plgpu.SMEM(numbers, stored) if self.unpacking else self.smem(*numbers, dtype=stored),
            self.smem(warpgroups, TILE_ROWS, self.unit, dtype=x_dtype) if keeps else None,
        )

    def multiply(
        self,
        acc: Any,
        operands: StagedOperands,
        slot: jax.Array,
        warpgroup: jax.Array,
        inputs: tuple[int, int],
        constant: Any,
        zero: Any,
    ) -> None:
        """Start to add to `acc` the products of `inputs`, from the first up to the last, of a slot's block.

        `zero` is subtracted from numbers. `constant` is `Unpacking.constant`, read from memory.
        """
        size = min(self.unit, self.chunk)
        for unit in range(*inputs, self.unit):
            operand = self._operand(operands, slot, warpgroup, unit, constant, zero)
            for first in range(0, self.unit, size):
                chunk, offset = divmod(unit + first, self.chunk)
                some = operands.x.at[slot, chunk, :, pl.ds(offset, size)].transpose((1, 0))
                part = operand
                if size < self.unit:
                    part = operand.at[:, pl.ds(first, size)] if self.interpret else operand[:, first : first + size]
                plgpu.wgmma(acc, part, some)

    def _operand(
        self, operands: StagedOperands, slot: jax.Array, warpgroup: jax.Array, unit: int, constant: Any, zero: Any
    ) -> Any:
        some = pl.ds(warpgroup * TILE_ROWS, TILE_ROWS)
        if self.unpacking is None:
            return operands.numbers.at[slot, 0, some]
        words = self.unit * self.unpacking.bits // 32
        copy, word = divmod(unit // self.unit * words, _COPIED_WORDS)
        source = operands.numbers.at[slot, copy, some, pl.ds(word, words)]
        tile = plgpu.load(source, layout=self.unpacking.layout, optimized=False)
        tile = self.unpacking.unpack(tile, constant, zero, interpret=self.interpret)
        if not self.interpret:
            return tile
        operands.unpacked[warpgroup] = tile
        plgpu.commit_smem()
        return operands.unpacked.at[warpgroup]

    def add_scaled(
        self,
        total: jax.Array,
        operands: StagedOperands,
        slot: jax.Array,
        warpgroup: jax.Array,
        constant: Any,
        scales: Sequence[Any],
        zeros: Sequence[Any],
        factors: Any,
    ) -> jax.Array:
        """Return `total` plus the products of a slot's block, those of each part multiplied by its scale.

        `factors`, `[parts, tokens]`, multiply the products of each part; if there are `zeros`, they are the sums of
        each part's inputs. Without `factors`, zeros are whole numbers, and are subtracted from the numbers.
        """
        for part, (scale, zero) in enumerate(zip(scales, zeros, strict=True)):
            inputs = part * self.part, (part + 1) * self.part

            def product_of(acc: Any, inputs: Any = inputs, zero: Any = None if factors is not None else zero) -> Any:
                self.multiply(acc, operands, slot, warpgroup, inputs, constant, zero)
                return acc[...].astype(jnp.float32)

            sums = jnp.int32 if operands.x.dtype == jnp.int8 else jnp.float32
            product = pl.run_scoped(product_of, ACCUMULATOR((TILE_ROWS, self.tokens), sums))
            if factors is not None:
                factor = plgpu.load(factors.at[part, pl.ds(0, self.tokens)], layout=COLUMNS, optimized=False)
                factor = lax.broadcast_in_dim(factor, product.shape, [1])
                product = product * factor if zero is None else product - of_rows(zero, product) * factor
            total = total + (product if scale is None else of_rows(scale, product) * product)
        return total

    def zero_sums(self) -> jax.Array:
        """Return sums of zero in the layout that products have."""
        return plgpu.layout_cast(jnp.zeros((TILE_ROWS, self.tokens), jnp.float32), TILE)


def of_rows(column: jax.Array, like: jax.Array) -> jax.Array:
    """Return a number of each row in float32, repeated for all tokens."""
    return lax.broadcast_in_dim(column.astype(jnp.float32), like.shape, [0])


def scalars(sums: jax.Array) -> jax.Array:
    """Return sums in a layout of single numbers, as neighbours in registers belong to different tokens."""
    out = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=SCALARS)
    rename = plgpu.inline_mgpu(arg_types=(TILE,), return_type=out)
    result: jax.Array = rename(lambda _, x: x.to_layout(SCALARS.to_mgpu()))(sums)
    return result


def store_transposed(ref: Any, sums: jax.Array) -> None:
    """Store sums into shared memory in rows of tokens. Ordinary stores can't do this without a swizzle."""

    def store(_: Any, ref: Any, sums: Any) -> None:
        pairs = mgpu.bitwidth(sums.mlir_dtype) < 32
        sums = sums if pairs else sums.to_layout(SCALARS.to_mgpu())
        sums.store_untiled(mgpu.memref_transpose(ref, (1, 0)), optimized=False)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))(store)(ref, sums)
