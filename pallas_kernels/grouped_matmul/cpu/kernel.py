"""The grouped product with packed weights on a CPU: shares the strips of experts that have rows among threads.

All rows of an expert are multiplied by a few strips while these lie in the cache, so that each weight is read from
memory once. Experts without rows aren't read.
"""

from __future__ import annotations

import dataclasses
import functools

from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Buffer, Call, handler
from pallas_kernels.cpu.types import I32, I64, PTR
from pallas_kernels.quantized_matmul.cpu.amx_tiles import AmxTiles
from pallas_kernels.quantized_matmul.cpu.kernel import products_of, tiles_of
from pallas_kernels.quantized_matmul.cpu.layout import BLOCK, INTEGERS, STRIP, Format, run_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import PairProducts
from pallas_kernels.quantized_matmul.cpu.tiles import Product, Tiles, sums_by_block


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """The kernel: `x` bfloat16 `[tokens, in]`, the weights' bytes `[experts, out / 16, in / 32, run]`, the first row of
    each expert, int32 `[experts + 1]`, and the token of each row, int32 `[rows]`, to float32 `[rows, out]`.

    With `factors`, of formats without minima only, float32 factors of `x`, `[tokens, in / 32]`, come last: one for each
    of its blocks.
    """

    format: Format
    factors: bool = False

    @property
    def name(self) -> str:
        return f"llvm_grouped_matmul_{self.format}{'_factors' * self.factors}"

    def products(self, features: frozenset[str]) -> PairProducts:
        """Return how a CPU with these features multiplies pairs of inputs."""
        return products_of(features, self.format)

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        products = self.products(features)
        tiles = tiles_of(module, self.format, products, by_factors=self.factors)
        handler(module, self.name, 5 if self.factors else 4, 1, lambda call: self._share(call, tiles, products))

    def _share(self, call: Call, tiles: Tiles | AmxTiles, products: PairProducts) -> None:
        f = call.function
        x, weight, starts, tokens = call.arguments[:4]
        in_dim, strips = x.dim(1), weight.dim(1)
        has_minima = self.format in INTEGERS
        if has_minima:
            by_block = sums_by_block(f, x.data, x.dim(0), in_dim // BLOCK)
        else:
            by_block = call.arguments[4].data if self.factors else f.constant(PTR, 0)
        touched, num_touched = _touched_experts(f, starts.data, weight.dim(0))
        inputs = products.prepare_inputs(f, x.data, x.dim(0) * in_dim, by_block)
        rows, of_rows, gathered = inputs, by_block, []
        if isinstance(tiles, AmxTiles):  # rows of a tile must be equally far apart
            gather = functools.partial(_gather_rows, f, starts.data, weight.dim(0), tokens)
            rows = gather(inputs, in_dim * 2)
            of_rows = gather(by_block, in_dim // BLOCK * 4) if has_minima or self.factors else by_block
            gathered = [rows] if of_rows is by_block else [rows, of_rows]
        strip_bytes = weight.dim(2) * run_bytes(self.format)
        per_item = tiles.strips_of_item(f, strip_bytes, tokens.dim(0) // f.maximum(num_touched, 1))
        per_expert = (strips + per_item - 1) // per_item

        def work(f: Function, item: Value, *captured: Value) -> None:
            x, by_block, weight, starts, tokens, touched, out, in_dim, strips, strip_bytes, per_item = captured
            per_expert = (strips + per_item - 1) // per_item
            expert = _load_index(f, touched, item // per_expert)
            begin, end = _load_index(f, starts, expert), _load_index(f, starts, expert + 1)
            of_expert = f.at(weight, expert * strips * strip_bytes)
            first = item % per_expert * per_item

            product = Product(x, by_block, of_expert, out, in_dim, strips * STRIP)
            stop = f.minimum(first + per_item, strips)
            source = None if gathered else functools.partial(_load_index, f, tokens)
            tiles.multiply(f, product, (first, stop), (begin, end), source)

        out = call.results[0].data
        pointers = [rows, of_rows, weight.data, starts.data, tokens.data, touched, out]
        call.parallel_for(num_touched * per_expert, [*pointers, in_dim, strips, strip_bytes, per_item], work)
        for data in (touched, *gathered):
            f.call("free", None, data)
        products.free_inputs(f, inputs)
        if has_minima:
            f.call("free", None, by_block)


def _touched_experts(f: Function, starts: Value, experts: Value) -> tuple[Value, Value]:
    """Return the experts that have rows, and their number; the caller frees the memory."""
    touched = f.call("malloc", PTR, experts * 4)

    def look(expert: Value, count: Value) -> Value:
        f.store(f.convert("trunc", expert, I32), touched, count * 4)
        has_rows = _load_index(f, starts, expert) < _load_index(f, starts, expert + 1)
        return count + f.convert("zext", has_rows, I64)

    return touched, f.loop(experts, look, f.constant(I64, 0))[0]


def _gather_rows(f: Function, starts: Value, experts: Value, tokens: Buffer, data: Value, row_bytes: Value) -> Value:
    """Return the rows of `data` of each row's token; the caller frees the memory. Rows of no expert are left out."""
    rows = f.call("malloc", PTR, tokens.dim(0) * row_bytes)

    def copy(row: Value) -> None:
        token = _load_index(f, tokens.data, row)
        f.call("memcpy", PTR, f.at(rows, row * row_bytes), f.at(data, token * row_bytes), row_bytes)

    f.loop(_load_index(f, starts, experts), copy, start=_load_index(f, starts, f.constant(I64, 0)))
    return rows


def _load_index(f: Function, indices: Value, at: Value) -> Value:
    return f.convert("zext", f.load(I32, indices, at * 4), I64)
