"""The product with a packed weight on a CPU.

A tile is a few rows of `x` and a few strips of outputs, whose sums stay in registers over all blocks of inputs. As
`sum(x * (scale * q + minimum))` over a block is `scale * sum(x * q) + minimum * sum(x)`, the numbers `q` are multiplied
unscaled: they and `x` are exact in bfloat16, and their products are exact in float32. A row is summed in a fixed order,
whatever other rows there are.

If the CPU multiplies bfloat16 (AVX512_BF16), one instruction multiplies two inputs of 16 outputs, and 4-bit numbers
become bfloat16 by a table lookup in a register (AVX-512 BW). Otherwise both operands are converted to float32 first.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import struct
from collections.abc import Iterator
from typing import Protocol

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F16, F32, I16, I32, I64, PTR
from pallas_kernels.quantized_matmul.cpu.layout import (
    BITS,
    BLOCK,
    FP8_UNIT,
    INTEGERS,
    STRIP,
    Format,
    number_bytes,
    run_bytes,
)

ROWS = 4
STRIPS = 4
_ITEM_BYTES = 1 << 16
_SUMS = F32.times(STRIP)
_WORDS, _LANES = I16.times(2 * STRIP), I32.times(STRIP)
_SHORTS, _HALVES = I16.times(STRIP), F16.times(STRIP)
_HIGH = -(1 << 16)


@dataclasses.dataclass(frozen=True)
class PackedMatmul:
    """The kernel: `x` bfloat16 `[tokens, in]` and the weight's bytes `[out / 16, in / 32, run]` to float32
    `[tokens, out]`.

    With `factors`, of fp8 only, float32 factors of `x`, `[tokens, in / 32]`, come last: one for each of its blocks.
    """

    format: Format
    factors: bool = False

    @property
    def name(self) -> str:
        return f"llvm_quantized_matmul_{self.format}{'_factors' * self.factors}"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        products: _PairProducts = _BF16Products() if {"avx512bf16", "avx512bw"} <= features else _F32Products()
        shapes = [(rows, strips) for rows in range(1, ROWS + 1) for strips in (1, STRIPS)]
        tiles = {shape: self._tile(module, *shape, products) for shape in shapes}
        handler(module, self.name, 3 if self.factors else 2, 1, lambda call: self._share(call, tiles))

    @property
    def run(self) -> int:
        """Bytes of one block of one strip."""
        return run_bytes(self.format)

    def _share(self, call: Call, tiles: dict[tuple[int, int], str]) -> None:
        f = call.function
        x, weight = call.arguments[:2]
        tokens, in_dim, strips = x.dim(0), x.dim(1), weight.dim(0)
        has_minima = self.format in INTEGERS
        if has_minima:
            by_block = _sums_by_block(f, x.data, tokens, in_dim // BLOCK)
        else:
            by_block = call.arguments[2].data if self.factors else f.constant(PTR, 0)
        strip_bytes = weight.dim(1) * self.run
        # Many items, so that threads end together, but each large enough to be worth starting a thread
        per_item = (f.constant(I64, _ITEM_BYTES) // strip_bytes // STRIPS + 1) * STRIPS
        items = (strips + per_item - 1) // per_item

        def work(f: Function, item: Value, *captured: Value) -> None:
            x, by_block, weight, out, tokens, in_dim, strips, per_item, strip_bytes = captured
            blocks, out_dim = in_dim // BLOCK, strips * STRIP
            first = item * per_item
            stop = f.minimum(first + per_item, strips)
            whole = stop - (stop - first) % STRIPS

            def compute_strip(strip: Value, width: int) -> None:
                of_strip = f.at(weight, strip * strip_bytes)

                def tile(row: Value, rows: int) -> None:
                    to = f.at(out, (row * out_dim + strip * STRIP) * 4)
                    operands = (
                        f.at(x, row * in_dim * 2),
                        f.at(by_block, row * blocks * 4),
                        of_strip,
                        to,
                        in_dim,
                        out_dim,
                    )
                    f.call(tiles[rows, width], None, *operands)

                left = tokens % ROWS
                f.loop(tokens - left, lambda row: tile(row, ROWS), step=ROWS)
                for rows in range(1, ROWS):
                    f.when(left.equals(rows), functools.partial(tile, tokens - left, rows))

            f.loop(whole, lambda strip: compute_strip(strip, STRIPS), start=first, step=STRIPS)
            f.loop(stop, lambda strip: compute_strip(strip, 1), start=whole)

        out = call.results[0].data
        shared = [x.data, by_block, weight.data, out, tokens, in_dim, strips, per_item, strip_bytes]
        call.parallel_for(items, shared, work)
        if has_minima:
            f.call("free", None, by_block)

    def _tile(self, module: Module, rows: int, strips: int, products: _PairProducts) -> str:
        """Write the function of a tile and return its name.

        Its arguments: `x`, the sums or the factors of its blocks, the first strip, the output, `in_dim`, `out_dim`.
        """
        f = module.function(f"tile_{rows}x{strips}", [PTR, PTR, PTR, PTR, I64, I64])
        x, by_block, weight, out, in_dim, out_dim = f.arguments
        blocks = in_dim // BLOCK
        zero = f.constant(_SUMS, 0)
        scaled = self.format != "bf16"

        def block(at: Value, *totals: Value) -> list[Value]:
            runs = [f.at(weight, (blocks * strip + at) * self.run) for strip in range(strips)]
            pairs_at = [f.at(x, (in_dim * row + at * BLOCK) * 2) for row in range(rows)]
            made = [zero] * len(totals) if scaled else list(totals)
            numbers_of = [products.weight_pairs(f, run, self.format) for run in runs]
            for pair, numbers in enumerate(zip(*numbers_of, strict=True)):
                for row in range(rows):
                    factor = products.spread_inputs(f, f.load(I32, pairs_at[row], pair * I32.nbytes))
                    for strip in range(strips):
                        i = row * strips + strip
                        made[i] = products.multiply_add(f, made[i], numbers[strip], factor)
            if not scaled:
                return made
            size = number_bytes(self.format)
            scales = [f.load(_SUMS, run, size) for run in runs]
            minima = [f.load(_SUMS, run, size + _SUMS.nbytes) if self.format in INTEGERS else None for run in runs]
            for row in range(rows):
                own = None if not (self.factors or minima[0]) else f.load(F32, by_block, (blocks * row + at) * 4)
                spread = None if own is None else f.broadcast(own, STRIP)
                for strip, (scale, minimum) in enumerate(zip(scales, minima)):
                    i = row * strips + strip
                    plus = totals[i]
                    if spread is not None and minimum is not None:
                        plus = f.fma(minimum, spread, plus)
                    elif spread is not None:
                        scale = scale * spread
                    made[i] = f.fma(scale, made[i], plus)
            return made

        totals = f.loop(blocks, block, *[zero] * (rows * strips))
        for i, total in enumerate(totals):
            row, strip = divmod(i, strips)
            f.store(total, out, (out_dim * row + strip * STRIP) * 4)
        f.ret()
        return f.name


def _sums_by_block(f: Function, x: Value, tokens: Value, blocks: Value) -> Value:
    """Return the sums of the 32 inputs of each block, float32 `[tokens, blocks]`; the caller frees the memory.

    XLA could compute them before the call, but then their order of additions would depend on the program around it.
    """
    out = f.call("malloc", PTR, tokens * blocks * 4 + _SUMS.nbytes)

    def pairs(block: Value) -> Value:
        even, odd = maths.pairs_from_bf16(f, f.load(_LANES, x, block * (2 * BLOCK)))
        return even + odd

    def row(r: Value) -> None:
        begin, end = r * blocks, (r + 1) * blocks
        whole = end - blocks % STRIP

        def sum_blocks(first: Value) -> None:
            f.store(maths.lane_sums(f, [pairs(first + i) for i in range(STRIP)]), out, first * 4)

        def sum_block(block: Value) -> None:
            # Stores the sum in all lanes: the next sums are written later, and there is room beyond the last one
            f.store(maths.reduce_lanes(f, pairs(block), operator.add), out, block * 4)

        f.loop(whole, sum_blocks, start=begin, step=STRIP)
        f.loop(end, sum_block, start=whole)

    f.loop(tokens, row)
    return out


class _PairProducts(Protocol):
    """How a kernel multiplies pairs of neighbouring inputs."""

    def spread_inputs(self, f: Function, pair: Value) -> tuple[Value, ...]:
        """Return two neighbours of a row of `x`, two bfloat16 in one integer, broadcast to all lanes."""

    def weight_pairs(self, f: Function, run: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        """Yield the numbers of a strip's block, pair by pair."""

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        """Add the products of one pair to the total."""


class _BF16Products:
    """Pairs of bfloat16, multiplied and added to float32 sums by one instruction."""

    def spread_inputs(self, f: Function, pair: Value) -> tuple[Value, ...]:
        return (f.broadcast(pair, STRIP),)

    def weight_pairs(self, f: Function, run: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        if format == "fp8":
            for at in range(0, number_bytes(format), _SHORTS.nbytes):
                lanes = f.convert("zext", f.load(_SHORTS, run, at), _LANES)
                yield (_bf16_of_fp8(f, f.convert("bitcast", (lanes << 16) | ((lanes & 0xFF) << 8), _WORDS)),)
            return
        if format == "int8":
            for even, odd in _F32Products().weight_pairs(f, run, format):
                low, high = (f.convert("bitcast", number, _LANES) for number in (even, odd))
                yield ((low >> 16) | (high & _HIGH),)
            return
        # The table has every entry twice, so that a lookup depends only on the low four bits of a number
        table = f.constant(_WORDS, [_bfloat16(i % 16) for i in range(2 * STRIP)])
        for at in range(0, number_bytes(format), _WORDS.nbytes):
            if format == "bf16":
                yield (f.load(_LANES, run, at),)
                continue
            words = f.load(_WORDS, run, at)
            for nibble in range(4):
                yield (f.call("llvm.x86.avx512.permvar.hi.512", _WORDS, table, words >> 4 * nibble),)

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        return f.dot_bf16(numbers[0], factor[0], total)


class _F32Products:
    """Pairs of float32, on any CPU."""

    def spread_inputs(self, f: Function, pair: Value) -> tuple[Value, ...]:
        return tuple(f.broadcast(f.convert("bitcast", half, F32), STRIP) for half in (pair << 16, pair & _HIGH))

    def weight_pairs(self, f: Function, run: Value, format: Format) -> Iterator[tuple[Value, ...]]:
        if format == "fp8":
            for at in range(0, number_bytes(format), _SHORTS.nbytes):
                shorts = f.load(_SHORTS, run, at)
                yield tuple(_f32_of_fp8(f, high) for high in (shorts << 8, shorts))
            return
        bits = BITS[format]
        for at in range(0, number_bytes(format), _LANES.nbytes):
            lanes = f.load(_LANES, run, at)
            if format == "bf16":
                yield tuple(f.convert("bitcast", half, _SUMS) for half in (lanes << 16, lanes & _HIGH))
                continue
            for pair in range(16 // bits):
                # With four bits, the two numbers of a pair are 16 bits apart; with eight bits they are neighbours
                even, odd = (4 * pair, 4 * pair + 16) if bits == 4 else (16 * pair, 16 * pair + 8)
                numbers = [(lanes >> shift) & (2**bits - 1) for shift in (even, odd)]
                yield tuple(f.convert("sitofp", number, _SUMS) for number in numbers)

    def multiply_add(self, f: Function, total: Value, numbers: tuple[Value, ...], factor: tuple[Value, ...]) -> Value:
        return f.fma(numbers[0], factor[0], f.fma(numbers[1], factor[1], total))


def _f32_of_fp8(f: Function, high: Value) -> Value:
    """Return float8_e4m3fn numbers, the high bytes of 16-bit integers, divided by `FP8_UNIT`, in float32.

    A half has the same bits of exponent and more. Unlike float32, halves below the normal range are always converted,
    whatever the mode of the thread.
    """
    halves = f.convert("bitcast", f.binary("ashr", high, 1) & ~0x407F, _HALVES)
    return f.convert("fpext", halves, _SUMS)


def _bf16_of_fp8(f: Function, high: Value) -> Value:
    """Return the same as `_f32_of_fp8` as the bits of bfloat16.

    Products take bfloat16 below the normal range for zero, so fp8 numbers below theirs come from a table.
    """
    normal = ((high >> 4) & 0x7F0) + (_bfloat16(2**-6 / FP8_UNIT) - (1 << 7))
    table = f.constant(_WORDS, [_bfloat16(i * 2**-9 / FP8_UNIT) for i in range(_WORDS.lanes)])
    small = f.call("llvm.x86.avx512.permvar.hi.512", _WORDS, table, high >> 8)
    return f.select((high & 0x7800).equals(0), small, normal) | (high & 0x8000)


def _bfloat16(number: float) -> int:
    """Return the bfloat16 bits of a number of few bits."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0] >> 16)
