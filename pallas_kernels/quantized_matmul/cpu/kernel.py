"""The product with a packed weight on a CPU: shares the tiles of all rows and strips among threads."""

from __future__ import annotations

import dataclasses

from pallas_kernels.cpu import tile_registers
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import I32, I64, PTR
from pallas_kernels.quantized_matmul.cpu.amx_numbers import TileProducts
from pallas_kernels.quantized_matmul.cpu.amx_tiles import AmxTiles
from pallas_kernels.quantized_matmul.cpu.integers import I16Products
from pallas_kernels.quantized_matmul.cpu.layout import BLOCK, INTEGERS, STRIP, Format, run_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import BF16Products, F32Products, PairProducts
from pallas_kernels.quantized_matmul.cpu.tiles import Product, Tiles, sums_by_block


@dataclasses.dataclass(frozen=True)
class PackedMatmul:
    """The kernel: `x` bfloat16 `[tokens, in]` and the weight's bytes `[out / 16, in / 32, run]` to float32
    `[tokens, out]`, or rounded to bfloat16 if it `rounds`. It writes as many rows as the third operand says, an int32.

    With `factors`, of formats without minima only, float32 factors of `x`, `[tokens, in / 32]`, come last: one for each
    of its blocks.
    """

    format: Format
    factors: bool = False
    rounds: bool = False

    @property
    def name(self) -> str:
        return f"llvm_quantized_matmul_{self.format}{'_factors' * self.factors}{'_bf16_out' * self.rounds}"

    def products(self, features: frozenset[str]) -> PairProducts:
        """Return how a CPU with these features multiplies pairs of inputs."""
        return products_of(features, self.format)

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        products = self.products(features)
        tiles = tiles_of(module, self.format, products, by_factors=self.factors, rounds=self.rounds)
        handler(module, self.name, 4 if self.factors else 3, 1, lambda call: self._share(call, tiles, products))

    def _share(self, call: Call, tiles: Tiles | AmxTiles, products: PairProducts) -> None:
        f = call.function
        x, weight, num_rows = call.arguments[:3]
        tokens = f.minimum(f.convert("sext", f.load(I32, num_rows.data), I64), x.dim(0))
        in_dim, strips = x.dim(1), weight.dim(0)
        has_minima = self.format in INTEGERS
        if has_minima:
            by_block = sums_by_block(f, x.data, tokens, in_dim // BLOCK)
        else:
            by_block = call.arguments[3].data if self.factors else f.constant(PTR, 0)
        inputs = products.prepare_inputs(f, x.data, tokens * in_dim, by_block)
        strip_bytes = weight.dim(1) * run_bytes(self.format)
        per_item = tiles.strips_of_item(f, strip_bytes, tokens)
        items = (strips + per_item - 1) // per_item

        def work(f: Function, item: Value, *captured: Value) -> None:
            x, by_block, weight, out, tokens, in_dim, strips, per_item = captured
            first = item * per_item
            product = Product(x, by_block, weight, out, in_dim, strips * STRIP)
            stop = f.minimum(first + per_item, strips)
            tiles.multiply(f, product, (first, stop), (f.constant(I64, 0), tokens))

        out = call.results[0].data
        shared = [inputs, by_block, weight.data, out, tokens, in_dim, strips, per_item]
        call.parallel_for(items, shared, work)
        products.free_inputs(f, inputs)
        if has_minima:
            f.call("free", None, by_block)


def products_of(features: frozenset[str], format: Format) -> PairProducts:
    """Return how a CPU with these features multiplies pairs of a format."""
    if {"avx512bf16", "avx512bw"} <= features:
        has_tiles = tile_registers.FEATURES | {"avx512fp16"} <= features
        return TileProducts() if has_tiles else BF16Products()
    if "avx512f" in features or "avx2" not in features or format not in INTEGERS:
        return F32Products(has_tables="avx512f" in features)
    return I16Products(format)


def tiles_of(
    module: Module,
    format: Format,
    products: PairProducts,
    *,
    by_factors: bool,
    rounds: bool = False,
) -> Tiles | AmxTiles:
    """Add the functions of the tiles of such products."""
    if isinstance(products, TileProducts):
        return AmxTiles(module, format, products, by_factors=by_factors, rounds=rounds)
    return Tiles(module, format, products, by_factors=by_factors, rounds=rounds)
