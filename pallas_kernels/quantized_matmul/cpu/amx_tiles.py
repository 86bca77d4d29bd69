"""Tiles of a product with a packed weight on a CPU with tile registers (AMX): 16 rows of `x` and a strip of outputs.

One instruction multiplies a block of inputs of a tile, 16 times as fast as those of vectors. So unpacking numbers and
scaling sums take most of the time. Scales and minima are applied as in `tiles`. A row is summed in a fixed order,
whatever other rows there are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.tile_registers import ROW_BYTES, ROWS, TILE_BYTES, TileRegisters
from pallas_kernels.cpu.types import F32, I64
from pallas_kernels.quantized_matmul.cpu.amx_numbers import RowProducts, TileProducts
from pallas_kernels.quantized_matmul.cpu.layout import BLOCK, INTEGERS, STRIP, Format, number_bytes, run_bytes
from pallas_kernels.quantized_matmul.cpu.numbers import LANES, PARTS, SUMS
from pallas_kernels.quantized_matmul.cpu.tiles import KINDS, LINE_BYTES, Product, Tiles

_ITEM_BYTES, _ITEM_ROWS, _ITEM_STRIPS = 1 << 16, 64, 4
"""A thread takes about this many bytes of weights at a time, half of them for twice the rows; a multiple of strips."""
_PREFETCHED_BYTES = 1 << 12
_STREAMED_ROWS, _ANY_ROWS = (4, 8, ROWS), (1 << 63) - 1
"""The most rows of each function for one tile, and of the function for several tiles."""
_RING, _AHEAD = 4, 2
"""Blocks whose numbers and sums a stream keeps, and how far ahead it unpacks; the former is a power of two."""
_PAIR, _CHUNK, _PANEL_ROWS = 2, 2, 64
"""The strips, and the most blocks and rows, that several tiles share. They fit in half of a first cache: another thread
of the core may use the other half."""
_INPUT_BYTES = 2


class AmxTiles:
    """The functions of all tiles of a format, as `Tiles`.

    Each takes a product that begins with its first row and strip, and the numbers of rows and of strips.
    """

    def __init__(
        self, module: Module, format: Format, products: TileProducts, *, by_factors: bool, rounds: bool = False
    ) -> None:
        self._format, self._products, self._registers = format, products, products.registers
        self._rounds, self._out_bytes = rounds, 2 if rounds else 4
        self._has_minima = format in INTEGERS
        self._has_own = by_factors or self._has_minima
        self._run_bytes, self._number_bytes = run_bytes(format), number_bytes(format)
        self._row = None
        if format != "bf16":
            self._row = Tiles(module, format, RowProducts(), by_factors=by_factors, rounds=rounds)
        self._functions = dict(self._write_functions(module))

    def strips_of_item(self, f: Function, strip_bytes: Value, rows: Value) -> Value:
        """See `Tiles.strips_of_item`."""
        worth = f.constant(I64, _ITEM_BYTES) // (rows // _ITEM_ROWS + 1)
        return (worth // strip_bytes // _ITEM_STRIPS + 1) * _ITEM_STRIPS

    def multiply(
        self,
        f: Function,
        product: Product,
        strips: tuple[Value, Value],
        rows: tuple[Value, Value],
        source: Callable[[Value], Value] | None = None,
    ) -> None:
        """See `Tiles.multiply`; `source` must be None, as registers load rows that are equally far apart."""
        assert source is None
        if self._row is None:
            self._multiply_tiles(f, product, strips, rows)
            return
        multiply_tiles = functools.partial(self._multiply_tiles, f, product, strips, rows)
        f.when(
            (rows[1] - rows[0]).equals(1),
            functools.partial(self._row.multiply, f, product, strips, rows),
            multiply_tiles,
        )

    def _multiply_tiles(
        self, f: Function, product: Product, strips: tuple[Value, Value], rows: tuple[Value, Value]
    ) -> None:
        """Multiply by the function for this number of rows, with this thread's registers."""
        (first, stop), (begin, end) = strips, rows
        count, blocks = end - begin, product.in_dim // BLOCK
        whole = dataclasses.replace(
            product,
            x=f.at(product.x, product.in_dim * begin * _INPUT_BYTES),
            by_block=f.at(product.by_block, blocks * begin * F32.nbytes) if self._has_own else product.by_block,
            weight=f.at(product.weight, blocks * first * self._run_bytes),
            out=f.at(product.out, (product.out_dim * begin + first * STRIP) * self._out_bytes),
        )
        registers = self._registers(f, f.minimum(count, ROWS))
        registers.configure()

        def call(name: str) -> None:
            f.call(name, None, *whole.values, count, stop - first)

        for fewer, (most, name) in zip((0, *self._functions), self._functions.items()):
            f.when((count > fewer) & (count <= most), functools.partial(call, name))
        registers.release()

    def _write_functions(self, module: Module) -> Iterator[tuple[int, str]]:
        """Write the functions; yield them with the most rows of each."""
        if self._format == "bf16":
            yield _ANY_ROWS, self._write_dense(module)
            return
        for rows in _STREAMED_ROWS:
            yield rows, self._write_stream(module, rows)
        yield _ANY_ROWS, self._write_tiles(module)

    def _write_stream(self, module: Module, rows: int) -> str:
        """Write the function of at most `rows` rows, one tile.

        Numbers are unpacked a few blocks ahead, in the next strip too. A register can't load numbers right after they
        were stored, and reading from memory thus never pauses.
        """
        f, product, count, strips = self._function(module, f"stream_{rows}")
        registers = self._registers(f, count)
        numbers, sums = f.stack(_RING * TILE_BYTES), f.stack(_RING * TILE_BYTES)
        blocks = product.in_dim // BLOCK
        places = [f.minimum(count - 1, i) for i in range(rows)]  # a row that isn't there is the last one again

        def unpack(at: Value) -> None:
            self._unpack(f, f.at(product.weight, at * self._run_bytes), f.at(numbers, _slot(at)))

        def multiply_strip(strip: Value) -> None:
            def multiply_block(block: Value, *totals: Value) -> list[Value]:
                at = blocks * strip + block
                f.when(at + _AHEAD < blocks * strips, lambda: unpack(at + _AHEAD))
                of_block = f.at(sums, _slot(at))
                x = f.at(product.x, block * ROW_BYTES)
                self._multiply_block(registers, x, product.in_dim * _INPUT_BYTES, f.at(numbers, _slot(at)), of_block)
                of_rows = [f.at(of_block, row * ROW_BYTES) for row in places]
                own = [f.at(product.by_block, (blocks * row + block) * F32.nbytes) for row in places]
                return self._add_scaled(f, totals, of_rows, f.at(product.weight, at * self._run_bytes), own)

            totals = f.loop(blocks, multiply_block, *[f.constant(SUMS, 0)] * rows)
            for total, row in zip(totals, places):
                self._store(f, total, product, row, strip)

        f.loop(f.minimum(blocks * strips, _AHEAD), unpack)
        f.loop(strips, multiply_strip)
        f.ret()
        return f.name

    def _write_tiles(self, module: Module) -> str:
        """Write the function of several tiles.

        Two strips share the registers of `x`. The numbers of a chunk of both, the sums of a tile and the totals of a
        panel of rows fit in a first cache, so that only inputs come from the second.
        """
        f, product, count, strips = self._function(module, "tiles")
        whole = strips - strips % _PAIR
        f.loop(whole, functools.partial(self._multiply_panels, f, product, count, _PAIR), step=_PAIR)
        f.loop(strips, functools.partial(self._multiply_panels, f, product, count, 1), start=whole)
        f.ret()
        return f.name

    def _multiply_panels(self, f: Function, product: Product, count: Value, width: int, strip: Value) -> None:
        """Multiply `width` strips, from `strip` on, by all rows."""
        blocks, row_bytes = product.in_dim // BLOCK, product.in_dim * _INPUT_BYTES
        registers = self._registers(f, f.constant(I64, ROWS))
        used = registers.SUMS[:width]
        numbers, sums = (f.stack(width * _CHUNK * TILE_BYTES) for _ in range(2))
        all_totals = f.stack(_PANEL_ROWS * width * SUMS.nbytes)

        def first_row(tile: Value) -> Value:
            return f.minimum(tile, count - ROWS)  # the last tile has rows of the one before, so that it is whole

        def multiply_panel(first: Value) -> None:
            stop = f.minimum(first + _PANEL_ROWS, count)

            def totals_of(tile: Value, number: int) -> list[Value]:
                of_tile = f.at(all_totals, (tile - first) * (width * SUMS.nbytes))
                return [f.at(of_tile, (number * ROWS + i) * SUMS.nbytes) for i in range(ROWS)]

            def multiply_chunk(start: Value) -> None:
                some = f.minimum(blocks - start, _CHUNK)
                weights = [f.at(product.weight, (blocks * (strip + i) + start) * self._run_bytes) for i in used]

                def slots(tiles: Value, at: Value) -> list[Value]:
                    return [f.at(tiles, (at * width + i) * TILE_BYTES) for i in used]

                def unpack(at: Value) -> None:
                    for weight, to in zip(weights, slots(numbers, at)):
                        self._unpack(f, f.at(weight, at * self._run_bytes), to, _PREFETCHED_BYTES // width)

                def multiply_tile(tile: Value) -> None:
                    row = first_row(tile)
                    x = f.at(product.x, row_bytes * row + start * ROW_BYTES)

                    def multiply_block(at: Value) -> None:
                        registers.load(registers.LEFT, f.at(x, at * ROW_BYTES), row_bytes)
                        for number, right, of_strip in zip(used, itertools.cycle(registers.RIGHT), slots(numbers, at)):
                            registers.load(right, of_strip)
                            registers.clear(number)
                            registers.add_products(number, right)
                        for number, to in zip(used, slots(sums, at)):
                            registers.store(number, to)

                    def add_block(number: int, at: Value, *totals: Value) -> list[Value]:
                        of_block = slots(sums, at)[number]
                        of_rows = [f.at(of_block, i * ROW_BYTES) for i in range(ROWS)]
                        own = [f.opaque(f.at(product.by_block, (blocks * row + start + at) * F32.nbytes))]
                        for _ in range(1, ROWS):
                            own.append(f.opaque(f.at(own[-1], blocks * F32.nbytes)))
                        return self._add_scaled(f, totals, of_rows, f.at(weights[number], at * self._run_bytes), own)

                    f.loop(some, multiply_block)
                    for number in used:
                        places = totals_of(tile, number)
                        before = [f.load(SUMS, place) for place in places]
                        for total, place in zip(f.loop(some, functools.partial(add_block, number), *before), places):
                            f.store(total, place)

                f.loop(some, unpack)
                f.loop(stop, multiply_tile, start=first, step=ROWS)

            def store_tile(tile: Value) -> None:
                for number in used:
                    for i, place in enumerate(totals_of(tile, number)):
                        self._store(f, f.load(SUMS, place), product, first_row(tile) + i, strip + number)

            f.loop(_PANEL_ROWS * width, lambda i: f.store(f.constant(SUMS, 0), all_totals, i * SUMS.nbytes))
            f.loop(blocks, multiply_chunk, step=_CHUNK)
            f.loop(stop, store_tile, start=first, step=ROWS)

        f.loop(count, multiply_panel, step=_PANEL_ROWS)

    def _write_dense(self, module: Module) -> str:
        """Write the function of bfloat16 weights: registers load them as they are, and sums stay in registers."""
        f, product, count, strips = self._function(module, "dense")
        registers, sums = self._registers(f, f.minimum(count, ROWS)), f.stack(TILE_BYTES)
        blocks = product.in_dim // BLOCK

        def multiply_strips(width: int, strip: Value) -> None:
            used = registers.SUMS[:width]
            weights = [f.at(product.weight, blocks * (strip + number) * TILE_BYTES) for number in used]

            def multiply_tile(place: Value) -> None:
                row = f.maximum(f.minimum(place, count - ROWS), 0)
                # A tile whose strips are in the cache fetches the bytes that it reads now: less work than a branch
                ahead = f.select(place.equals(0), f.constant(I64, _PREFETCHED_BYTES // width), 0)

                def multiply_block(block: Value) -> None:
                    x = f.at(product.x, (product.in_dim * row + block * BLOCK) * _INPUT_BYTES)
                    registers.load(registers.LEFT, x, product.in_dim * _INPUT_BYTES)
                    for number, weight, right in zip(used, weights, itertools.cycle(registers.RIGHT)):
                        run = f.at(weight, block * TILE_BYTES)
                        for line in range(0, TILE_BYTES, LINE_BYTES):
                            f.prefetch(f.at(run, ahead + line))
                        registers.load(right, run)
                        registers.add_products(number, right)

                for number in used:
                    registers.clear(number)
                f.loop(blocks, multiply_block)
                for number in used:
                    store_tile(row, number, strip + number)

            f.loop(count, multiply_tile, step=ROWS)

        def store_tile(row: Value, number: int, strip: Value) -> None:
            if not self._rounds:
                out = f.at(product.out, (product.out_dim * row + strip * STRIP) * F32.nbytes)
                registers.store(number, out, product.out_dim * F32.nbytes)
                return
            registers.store(number, sums)
            rows = f.minimum(count - row, ROWS)
            f.loop(rows, lambda i: self._store(f, f.load(SUMS, sums, i * ROW_BYTES), product, row + i, strip))

        most = len(registers.SUMS)
        whole = strips - strips % most
        f.loop(whole, functools.partial(multiply_strips, most), step=most)
        f.loop(strips, functools.partial(multiply_strips, 1), start=whole)
        f.ret()
        return f.name

    def _function(self, module: Module, name: str) -> tuple[Function, Product, Value, Value]:
        """Return a new function, and its product, number of rows, and number of strips."""
        f = module.function(name, [*KINDS, I64, I64])
        *fields, count, strips = f.arguments
        return f, Product(*fields), count, strips

    def _unpack(self, f: Function, run: Value, to: Value, ahead: int = _PREFETCHED_BYTES) -> None:
        """Store the numbers of a run as a register of `RIGHT`; fetch what lies `ahead`, in bytes."""
        for line in range(0, self._run_bytes, LINE_BYTES):
            f.prefetch(f.at(run, ahead + line))
        size = self._number_bytes // PARTS
        parts = (self._products.weight_pairs(f, f.at(run, part * size), self._format) for part in range(PARTS))
        for pair, (number,) in enumerate(itertools.chain.from_iterable(parts)):
            f.store(number, to, pair * LANES.nbytes)

    def _multiply_block(self, registers: TileRegisters, x: Value, row_bytes: Value, numbers: Value, to: Value) -> None:
        """Store the sums of one block of a tile's inputs `x`, whose rows are `row_bytes` apart."""
        sums, right = registers.SUMS[0], registers.RIGHT[0]
        registers.load(registers.LEFT, x, row_bytes)
        registers.load(right, numbers)
        registers.clear(sums)
        registers.add_products(sums, right)
        registers.store(sums, to)

    def _add_scaled(
        self, f: Function, totals: Sequence[Value], sums: Sequence[Value], run: Value, own: Sequence[Value]
    ) -> list[Value]:
        """Return the totals of rows plus their sums of a block, scaled by its run's scales, and its minima, if any.

        `sums` points to the sums of each row; `own` to its factor for the block or, for minima, the sum of its inputs.
        """
        scale = f.load(SUMS, run, self._number_bytes)
        minimum = f.load(SUMS, run, self._number_bytes + SUMS.nbytes) if self._has_minima else None
        made = []
        for total, of_row, own_of_row in zip(totals, sums, own):
            factor, spread = scale, f.broadcast(f.load(F32, own_of_row), STRIP) if self._has_own else None
            if spread is not None and minimum is not None:
                total = f.fma(minimum, spread, total)
            elif spread is not None:
                factor = scale * spread
            made.append(f.fma(factor, f.load(SUMS, of_row), total))
        return made

    def _store(self, f: Function, total: Value, product: Product, row: Value, strip: Value) -> None:
        """Store the total of a row and a strip."""
        number = self._products.to_bf16(f, total) if self._rounds else total
        f.store(number, product.out, (product.out_dim * row + strip * STRIP) * self._out_bytes)


def _slot(at: Value) -> Value:
    """Return where the numbers or sums of a block are in a ring."""
    return (at & (_RING - 1)) * TILE_BYTES
