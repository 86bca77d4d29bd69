"""Tiles of a product with a packed weight on a CPU.

A tile is a few rows of `x` and a few strips of outputs, whose sums stay in registers over all blocks of inputs. As
`sum(x * (scale * q + minimum))` over a block is `scale * sum(x * q) + minimum * sum(x)`, the numbers `q` are multiplied
unscaled: they and `x` are exact in bfloat16, and their products are exact in float32. A row is summed in a fixed order,
whatever other rows there are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.types import F32, I1, I64, PTR
from pallas_kernels.quantized_matmul.cpu.layout import BLOCK, INTEGERS, STRIP, Format, number_bytes, run_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, PARTS, SUMS, PairProducts

_ITEM_BYTES = 1 << 16
LINE_BYTES = 64
_PREFETCHED_BYTES = 1 << 12
"""How far ahead the strips of a tile are fetched: alone, a core has too few reads under way for the memory's speed.

The fetches lie between the products, one or two at a time: many in a row would hold up the products behind them.
"""
_PANEL_ROWS = 64
"""The most rows of a panel: their sums of four strips take a third of a core's first cache."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product as one thread of a kernel sees it: pointers and sizes.

    `x` are inputs that `PairProducts` has prepared, `by_block` are the sums of each row's blocks or its factors.
    `weight` and `out` begin with the first strip and the first row.
    """

    x: Value
    by_block: Value
    weight: Value
    out: Value
    in_dim: Value
    out_dim: Value

    @property
    def values(self) -> list[Value]:
        """All fields, as arguments of a function."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


KINDS = [PTR, PTR, PTR, PTR, I64, I64]


class Tiles:
    """The functions of all tiles of a format: those of `products.tiles`, and one strip by each of their row counts.

    If numbers take long to unpack, many rows form a panel: the numbers of a block are unpacked once for all its tiles,
    and the sums of the panel lie in the cache.

    With `by_factors`, each row has a factor for each block of its inputs. For formats with minima, it has the sum of
    the inputs instead. Outputs are float32, or bfloat16 if it `rounds`.
    """

    def __init__(
        self, module: Module, format: Format, products: PairProducts, *, by_factors: bool, rounds: bool = False
    ) -> None:
        assert not (by_factors and format in INTEGERS), format
        self._format, self._products, self._by_factors, self._rounds = format, products, by_factors, rounds
        self._out_bytes = 2 if rounds else 4
        self._run_bytes, self._number_bytes = run_bytes(format), number_bytes(format)
        self._shapes = products.tiles
        self._rows, self._strips = tuple(products.tiles), max(products.tiles.values())
        shapes = dict.fromkeys((rows, strips) for rows, most in products.tiles.items() for strips in (1, most))
        self._tiles = {shape: self._write_tile(module, *shape) for shape in shapes}
        self._panel = self._write_panel(module) if format in products.panel_formats else None

    def strips_of_item(self, f: Function, strip_bytes: Value, rows: Value) -> Value:
        """Return how many strips a thread takes at a time: enough to be worth it, but few, so that all end together."""
        worth = f.constant(I64, _ITEM_BYTES) // (rows // self._rows[-1] + 1)
        return (worth // strip_bytes // self._strips + 1) * self._strips

    def multiply(
        self,
        f: Function,
        product: Product,
        strips: tuple[Value, Value],
        rows: tuple[Value, Value],
        source: Callable[[Value], Value] | None = None,
    ) -> None:
        """Multiply the strips from `strips[0]` up to `strips[1]` by the rows of this range; strips stay in the cache.

        `source` returns which row of `x` belongs to a row of `out`, if it isn't the same.
        """
        source = source or (lambda row: row)
        first, stop = strips
        begin, end = rows
        most = self._rows[-1]
        whole, left = stop - (stop - first) % self._strips, (end - begin) % most
        strip_bytes = product.in_dim // BLOCK * self._run_bytes
        sources = f.stack(_PANEL_ROWS * I64.nbytes)

        def compute_strips(strip: Value, width: int) -> None:
            def from_strip(number: int) -> Product:
                weight = f.at(product.weight, (strip + number) * strip_bytes)
                out = f.at(product.out, (strip + number) * (STRIP * self._out_bytes))
                return dataclasses.replace(product, weight=weight, out=out)

            whole = from_strip(0)

            def compute_panel(name: str, row: Value) -> None:
                count = f.minimum(end - left - row, _PANEL_ROWS)
                f.loop(count, lambda i: f.store(source(row + i), sources, i * I64.nbytes))
                panel = dataclasses.replace(whole, out=f.at(whole.out, product.out_dim * row * self._out_bytes))
                f.call(name, None, *panel.values, row.equals(begin), sources, count)

            def compute_tile(count: int, row: Value) -> None:
                # A tile with fewer rows than its function has computes the last one several times
                targets = [row, *(f.minimum(row + i, end - 1) for i in range(1, count))]
                places = [*map(source, targets), *targets]
                strips = min(width, self._shapes[count])
                for number in range(0, width, strips):
                    tile = self._tiles[count, strips]
                    f.call(tile, None, *from_strip(number).values, row.equals(begin), *places)

            tiled = begin
            if self._panel is not None and width == self._strips:
                tiled = f.select(end - begin < 2 * most, begin, end - left)
                f.loop(tiled, functools.partial(compute_panel, self._panel), start=begin, step=_PANEL_ROWS)
            f.loop(end - left, functools.partial(compute_tile, most), start=tiled, step=most)
            for fewer, count in itertools.pairwise((0, *self._rows)):
                is_shape = (left > fewer) & (left <= count)
                f.when(is_shape, functools.partial(compute_tile, count, end - left))

        f.loop(whole, lambda strip: compute_strips(strip, self._strips), start=first, step=self._strips)
        f.loop(stop, lambda strip: compute_strips(strip, 1), start=whole)

    def _write_tile(self, module: Module, rows: int, strips: int) -> str:
        """Write a tile's function of a product, whether it reads the strips first, rows of `x`, and rows of `out`."""
        f = module.function(f"tile_{rows}x{strips}", [*KINDS, I1, *[I64] * (2 * rows)])
        product, reads_first, places = Product(*f.arguments[:6]), f.arguments[6], f.arguments[7:]
        sources, targets = places[:rows], places[rows:]
        zeros, none = ([f.constant(kind, 0)] * (rows * strips) for kind in (SUMS, self._products.sums))

        def block(at: Value, *totals: Value) -> list[Value]:
            runs, ahead = self._runs(f, product, at, strips, reads_first)
            inputs = self._inputs(f, product, at, sources)

            def part(at: Value, *sums: Value) -> list[Value]:
                return self._add_products(f, sums, inputs, at, self._unpack(f, runs, ahead, at))

            if self._format == "bf16":
                return f.loop(PARTS, part, *totals)
            sums = f.loop(PARTS, part, *none)
            return self._add_scaled(f, totals, sums, inputs, product, at, runs, sources)

        totals = f.loop(product.in_dim // BLOCK, block, *zeros)
        for row, target in enumerate(targets):
            self._store(f, totals[row * strips : (row + 1) * strips], product, target)
        f.ret()
        return f.name

    def _write_panel(self, module: Module) -> str:
        """Write a panel's function of a product, whether it reads the strips first, rows of `x`, and their number."""
        f = module.function("panel", [*KINDS, I1, PTR, I64])
        product, (reads_first, sources, rows) = Product(*f.arguments[:6]), f.arguments[6:]
        most, strips = self._rows[-1], self._strips
        row_bytes, part_bytes = strips * SUMS.nbytes, BLOCK // PARTS // 2 * strips * LANES.nbytes
        all_totals, unpacked = f.stack(_PANEL_ROWS * row_bytes), f.stack(PARTS * part_bytes)

        def totals_of(row: Value) -> list[Value]:
            return [f.load(SUMS, all_totals, row * row_bytes + strip * SUMS.nbytes) for strip in range(strips)]

        def block(at: Value) -> None:
            runs, ahead = self._runs(f, product, at, strips, reads_first)

            def unpack(part: Value) -> None:
                numbers = itertools.chain.from_iterable(self._unpack(f, runs, ahead, part))
                for i, (number,) in enumerate(numbers):
                    f.store(number, unpacked, part * part_bytes + i * LANES.nbytes)

            def tile(row: Value) -> None:
                own = [f.load(I64, sources, (row + i) * I64.nbytes) for i in range(most)]
                inputs = self._inputs(f, product, at, own)

                def part(at: Value, *sums: Value) -> list[Value]:
                    places = range(0, part_bytes, LANES.nbytes)
                    numbers = ((f.load(LANES, unpacked, at * part_bytes + place),) for place in places)
                    return self._add_products(f, sums, inputs, at, zip(*[numbers] * strips))

                sums = f.loop(PARTS, part, *[f.constant(self._products.sums, 0)] * (most * strips))
                before = [total for i in range(most) for total in totals_of(row + i)]
                totals = self._add_scaled(f, before, sums, inputs, product, at, runs, own)
                for i, total in enumerate(totals):
                    f.store(total, all_totals, row * row_bytes + i * SUMS.nbytes)

            f.loop(PARTS, unpack)
            f.loop(rows, tile, step=most)

        f.loop(rows * strips, lambda i: f.store(f.constant(SUMS, 0), all_totals, i * SUMS.nbytes))
        f.loop(product.in_dim // BLOCK, block)
        f.loop(rows, lambda row: self._store(f, totals_of(row), product, row))
        f.ret()
        return f.name

    def _runs(
        self, f: Function, product: Product, at: Value, strips: int, reads_first: Value
    ) -> tuple[list[Value], Value]:
        """Return where a block's runs are, and how far behind them the bytes lie that are fetched meanwhile.

        If the strips are read for the first time, they are in no cache.
        """
        blocks, blocks_ahead = product.in_dim // BLOCK, _PREFETCHED_BYTES // strips // self._run_bytes
        runs = [f.at(product.weight, (blocks * strip + at) * self._run_bytes) for strip in range(strips)]
        # Behind the end of a strip lies the next strip of this tile; the bytes to read next lie behind the last strip
        skipped = f.select(at + blocks_ahead < blocks, f.constant(I64, 0), blocks * ((strips - 1) * self._run_bytes))
        # A tile whose strips are in the cache fetches the bytes that it reads now: less work than a branch
        ahead = f.select(reads_first, skipped + blocks_ahead * self._run_bytes, 0)
        for line in range(self._number_bytes, self._run_bytes, LINE_BYTES):
            for run in runs:
                f.prefetch(f.at(run, ahead + line))
        return runs, ahead

    def _inputs(self, f: Function, product: Product, block: Value, sources: Sequence[Value]) -> list[Value]:
        """Return where the inputs of a block are, row by row."""
        blocks, size = product.in_dim // BLOCK, self._products.block_bytes
        return [f.at(product.x, (blocks * source + block) * size) for source in sources]

    def _unpack(
        self, f: Function, runs: Sequence[Value], ahead: Value, part: Value
    ) -> Iterator[tuple[tuple[Value, ...], ...]]:
        """Yield the numbers of a part of a block, pair by pair, for each strip."""
        size = self._number_bytes // PARTS
        parts = [f.at(run, part * size) for run in runs]
        by_strip = [self._products.weight_pairs(f, one, self._format) for one in parts]
        for line, numbers in zip(itertools.count(0, LINE_BYTES), zip(*by_strip, strict=True)):
            if line < size:
                for one in parts:
                    f.prefetch(f.at(one, ahead + line))
            yield numbers

    def _add_products(
        self,
        f: Function,
        sums: Sequence[Value],
        inputs: Sequence[Value],
        part: Value,
        pairs: Iterable[Sequence[tuple[Value, ...]]],
    ) -> list[Value]:
        """Return the sums of each row and strip plus the products of a part of a block."""
        made = list(sums)
        near = [f.at(one, part * (BLOCK // PARTS * self._products.input_bytes)) for one in inputs]
        for pair, numbers in enumerate(pairs):
            for row, one in enumerate(near):
                factor = self._products.spread_inputs(f, one, pair)
                for i, number in enumerate(numbers, start=row * len(numbers)):
                    made[i] = self._products.multiply_add(f, made[i], number, factor)
        return made

    def _add_scaled(
        self,
        f: Function,
        totals: Sequence[Value],
        sums: Sequence[Value],
        inputs: Sequence[Value],
        product: Product,
        block: Value,
        runs: Sequence[Value],
        sources: Sequence[Value],
    ) -> list[Value]:
        """Return the totals of each row and strip plus the scaled sums of a block."""
        size, has_minima = self._number_bytes, self._format in INTEGERS
        scales = [f.load(SUMS, run, size) for run in runs]
        minima = [f.load(SUMS, run, size + SUMS.nbytes) if has_minima else None for run in runs]
        made = []
        for row, source in enumerate(sources):
            spread = None
            if self._by_factors or has_minima:
                own = f.load(F32, product.by_block, (product.in_dim // BLOCK * source + block) * F32.nbytes)
                spread = f.broadcast(own, STRIP)
            for i, (scale, minimum) in enumerate(zip(scales, minima), start=row * len(runs)):
                plus = totals[i]
                if spread is not None and minimum is not None:
                    plus = f.fma(minimum, spread, plus)
                elif spread is not None:
                    scale = scale * spread
                made.append(f.fma(scale, self._products.sum_of_block(f, sums[i], inputs[row]), plus))
        return made

    def _store(self, f: Function, totals: Sequence[Value], product: Product, target: Value) -> None:
        """Store a row's totals."""
        for strip, total in enumerate(totals):
            to = (product.out_dim * target + strip * STRIP) * self._out_bytes
            f.store(self._products.to_bf16(f, total) if self._rounds else total, product.out, to)


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
