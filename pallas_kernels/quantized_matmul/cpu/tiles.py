"""Tiles of a product with a packed weight on a CPU.

A tile is a few rows of `x` and a few strips of outputs, whose sums stay in registers over all blocks of inputs. As
`sum(x * (scale * q + minimum))` over a block is `scale * sum(x * q) + minimum * sum(x)`, the numbers `q` are multiplied
unscaled: they and `x` are exact in bfloat16, and their products are exact in float32. A row is summed in a fixed order,
whatever other rows there are.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.types import F32, I1, I64, PTR
from pallas_kernels.quantized_matmul.cpu.layout import BLOCK, INTEGERS, STRIP, Format, number_bytes, run_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, PARTS, SUMS, PairProducts

_ITEM_BYTES = 1 << 16
_LINE_BYTES = 64
_PREFETCHED_BYTES = 1 << 12
"""How far ahead the strips of a tile are fetched: alone, a core has too few reads under way for the memory's speed.

The fetches lie between the products, one or two at a time: many in a row would hold up the products behind them.
"""


class Tiles:
    """The functions of all tiles of a format: of any of the `tile_rows` of `products`, and of one strip or several.

    With `by_factors`, each row has a factor for each block of its inputs. Of formats with minima, it has their sum.
    Outputs are float32, or bfloat16 if it `rounds`.
    """

    def __init__(
        self, module: Module, format: Format, products: PairProducts, *, by_factors: bool, rounds: bool = False
    ) -> None:
        assert not (by_factors and format in INTEGERS), format
        self._format, self._by_factors, self._rounds = format, by_factors, rounds
        self.out_bytes = 2 if rounds else 4
        self._rows, self._strips = products.tile_rows, products.tile_strips
        shapes = itertools.product(self._rows, (1, self._strips))
        self._names = {shape: self._write(module, *shape, products) for shape in shapes}

    def multiply(
        self,
        f: Function,
        x: Value,
        by_block: Value,
        weight: Value,
        out: Value,
        in_dim: Value,
        out_dim: Value,
        sources: Sequence[Value],
        targets: Sequence[Value],
        strips: int,
        *,
        reads_first: Value,
    ) -> None:
        """Multiply rows `sources` of `x` by the strips that begin at `weight`, into rows `targets` of `out`.

        `x` are inputs that `products` has prepared, and `out` is the place of the strips in the first row. If the tile
        `reads_first`, its strips are in no cache.
        """
        name = self._names[len(sources), strips]
        f.call(name, None, x, by_block, weight, out, in_dim, out_dim, reads_first, *sources, *targets)

    def strips_of_item(self, f: Function, strip_bytes: Value, rows: Value) -> Value:
        """Return how many strips a thread takes at a time: threads should end together, and each start be worth it."""
        worth = f.constant(I64, _ITEM_BYTES) // (rows // self._rows[-1] + 1)
        return (worth // strip_bytes // self._strips + 1) * self._strips

    def for_each(
        self,
        f: Function,
        strips: tuple[Value, Value],
        rows: tuple[Value, Value],
        tile: Callable[[Sequence[Value], Value, int], None],
    ) -> None:
        """Call `tile(rows, first strip, number of strips)` for all tiles; the strips of one stay in the cache.

        A tile with fewer rows than its function has computes the last one several times.
        """
        first, stop = strips
        begin, end = rows
        most = self._rows[-1]
        whole, left = stop - (stop - first) % self._strips, (end - begin) % most

        def compute_strips(strip: Value, width: int) -> None:
            def compute_rows(count: int, row: Value) -> None:
                tile([row, *(f.minimum(row + i, end - 1) for i in range(1, count))], strip, width)

            f.loop(end - left, functools.partial(compute_rows, most), start=begin, step=most)
            for fewer, count in itertools.pairwise((0, *self._rows)):
                is_shape = (left > fewer) & (left <= count)
                f.when(is_shape, functools.partial(compute_rows, count, end - left))

        f.loop(whole, lambda strip: compute_strips(strip, self._strips), start=first, step=self._strips)
        f.loop(stop, lambda strip: compute_strips(strip, 1), start=whole)

    def _write(self, module: Module, rows: int, strips: int, products: PairProducts) -> str:
        f = module.function(f"tile_{rows}x{strips}", [PTR, PTR, PTR, PTR, I64, I64, I1, *[I64] * (2 * rows)])
        x, by_block, weight, out, in_dim, out_dim, reads_first, *places = f.arguments
        sources, targets = places[:rows], places[rows:]
        blocks = in_dim // BLOCK
        zero = f.constant(SUMS, 0)
        scaled = self._format != "bf16"
        run_size, size = run_bytes(self._format), number_bytes(self._format)
        blocks_ahead = _PREFETCHED_BYTES // strips // run_size

        def block(at: Value, *totals: Value) -> list[Value]:
            runs = [f.at(weight, (blocks * strip + at) * run_size) for strip in range(strips)]
            # Behind the end of a strip lies the next one of this tile; what is read next lies behind the last one
            skipped = f.select(at + blocks_ahead < blocks, f.constant(I64, 0), blocks * ((strips - 1) * run_size))
            # A tile whose strips are in the cache fetches what it reads at once: less work than a branch
            ahead = f.select(reads_first, skipped + blocks_ahead * run_size, 0)
            for line in range(size, run_size, _LINE_BYTES):
                for run in runs:
                    f.prefetch(f.at(run, ahead + line))
            inputs = [f.at(x, (in_dim * source + at * BLOCK) * products.input_bytes) for source in sources]

            def part(at: Value, *sums: Value) -> list[Value]:
                made = list(sums)
                parts = [f.at(run, at * (size // PARTS)) for run in runs]
                numbers_of = [products.weight_pairs(f, one, self._format) for one in parts]
                near = [f.at(one, at * (BLOCK // PARTS * products.input_bytes)) for one in inputs]
                for pair, numbers in enumerate(zip(*numbers_of, strict=True)):
                    if pair * _LINE_BYTES < size // PARTS:
                        for one in parts:
                            f.prefetch(f.at(one, ahead + pair * _LINE_BYTES))
                    for row in range(rows):
                        factor = products.spread_inputs(f, near[row], pair)
                        for strip in range(strips):
                            i = row * strips + strip
                            made[i] = products.multiply_add(f, made[i], numbers[strip], factor)
                return made

            made = f.loop(PARTS, part, *([zero] * len(totals) if scaled else totals))
            if not scaled:
                return made
            scales = [f.load(SUMS, run, size) for run in runs]
            minima = [f.load(SUMS, run, size + SUMS.nbytes) if self._format in INTEGERS else None for run in runs]
            for row, source in enumerate(sources):
                has_own = self._by_factors or self._format in INTEGERS
                own = f.load(F32, by_block, (blocks * source + at) * 4) if has_own else None
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
            to = (out_dim * targets[row] + strip * STRIP) * self.out_bytes
            f.store(products.to_bf16(f, total) if self._rounds else total, out, to)
        f.ret()
        return f.name


def sums_by_block(f: Function, x: Value, tokens: Value, blocks: Value) -> Value:
    """Return the sums of the 32 inputs of each block, float32 `[tokens, blocks]`; the caller frees the memory.

    XLA could compute them before the call, but then their order of additions would depend on the program around it.
    """
    out = f.call("malloc", PTR, tokens * blocks * 4 + SUMS.nbytes)

    def pairs(block: Value) -> Value:
        even, odd = maths.pairs_from_bf16(f, f.load(LANES, x, block * (2 * BLOCK)))
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
