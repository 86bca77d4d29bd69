"""Fills quantized and packed weights (`quant.transform`): reads parts that fit in a core's cache, and packs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.host import num_cores
from jaxserve.params import ParamSpec, Path, Window
from jaxserve.quant import EMBEDDING, HEAD, flat_inputs, held_weights
from jaxserve.weights.arrays import THREADS, Fill, WeightReader, flatten
from jaxserve.weights.quantized.rows import QuantizedRows, RowsOnTheFly, read_flat, row_windows
from jaxserve.weights.source import BLOCK_ELEMENTS
from pallas_kernels.quantized_matmul import (
    BLOCK,
    FACTORS,
    STRIP,
    PackedWeight,
    QuantizedWeight,
    pack_dense,
    pack_numbers,
)

Array = np.ndarray[Any, Any]
_TINY = np.float32(2.0**-30)
_MOST_THREADS = 8
"""The most threads that quantize weights as they are read; each holds a parameter in memory."""


def with_head(specs: Mapping[Path, ParamSpec]) -> dict[Path, ParamSpec]:
    """Return the specs of a model's parameters with that of a head of its own, if it is tied to the embedding."""
    return {HEAD: specs[EMBEDDING], **specs} if EMBEDDING in specs else dict(specs)


def held_reader(abstract: Any, dense: Any, reader: WeightReader, rows: QuantizedRows | None) -> WeightReader:
    """Return a reader of the parameters of `abstract`, which has quantized or packed weights.

    `reader` reads the parameters of `dense`, the same tree without them. `rows` are the weights that the checkpoint has
    quantized; others are quantized now. Without held weights, returns `reader` itself.
    """
    held = held_weights(abstract)
    if not held:
        return reader
    leaves, _ = flatten(abstract)
    specs = with_head(dict(flatten(dense)[0]))
    found = rows or RowsOnTheFly(reader.fill, specs, held)

    def fill(path: Path, spec: ParamSpec, window: Window, out: Array) -> None:
        owner, last = path[:-1], path[-1]
        weight = held.get(owner)
        if weight is None:
            reader.fill(path, spec, window, out)
        elif last == "order":
            out[...] = found.order(owner)
        elif last == "input_scale":
            out[...] = found.input_scale(owner)
        elif isinstance(weight, PackedWeight):
            _fill_packed(owner, weight, specs[owner], window, found, reader.fill, out)
        else:
            _fill_component(owner, str(last), weight, specs[owner], window, found, out)

    rank = {path: reader.order.index(i) for i, (path, _) in enumerate(flatten(dense)[0])}
    if HEAD in held:
        rank.setdefault(HEAD, rank[EMBEDDING])
    owners = [path[:-1] if path[:-1] in held else path for path, _ in leaves]
    order = tuple(sorted(range(len(owners)), key=lambda i: rank[owners[i]]))
    computes = rows is None and any(weight.scheme is not None for weight in held.values())
    return WeightReader(fill, order, min(max(THREADS, num_cores()), _MOST_THREADS) if computes else THREADS)


def _fill_component(
    path: Path, name: str, weight: QuantizedWeight, dense: ParamSpec, window: Window, rows: QuantizedRows, out: Array
) -> None:
    """Write a window of the numbers, the scales or the zeros of a weight, in their stored units."""
    scheme = weight.scheme
    inputs = flat_inputs(dense).shape[-1]
    *outer, last = window
    if name == "numbers":
        per_unit = 8 // scheme.bits
        columns = slice(last.start * per_unit, last.stop * per_unit)
        width = columns.stop - columns.start
        for outputs, inside in row_windows(tuple(outer), BLOCK_ELEMENTS // width):
            part = out[inside]
            numbers = np.empty((*part.shape[:-1], width), np.uint8)
            rows.numbers(path, (*outputs, columns), numbers)
            if weight.arrangement:
                runs = numbers.reshape(*numbers.shape[:-1], -1, len(weight.arrangement))
                numbers = np.take(runs, weight.arrangement, axis=-1).reshape(numbers.shape)
            if scheme.bits == 4:
                pairs = numbers.view("<u2")
                sign = 0x88 if scheme.numbers == "int4" else 0
                np.bitwise_xor((pairs | pairs >> 4).astype(np.uint8), sign, out=part)
            else:
                part.view(np.uint8)[...] = numbers ^ 0x80 if scheme.numbers == "int8" else numbers
        return
    for outputs, inside in row_windows(tuple(outer), BLOCK_ELEMENTS // (last.stop - last.start)):
        part = out[inside]
        factors = np.empty(part.shape, FACTORS)
        rows.factors(path, (*outputs, last), scheme.group or inputs, factors)
        scale, minimum = factors["scale"], factors["minimum"]
        if scheme.zeros:
            # A group without a scale may still have a minimum: then a tiny one, and a zero beyond all numbers, give it
            scale = np.where((scale == 0) & (minimum != 0), np.abs(minimum) * _TINY, scale)
        middle = np.float32(1 << (scheme.bits - 1))
        if name == "scale":
            part[...] = scale
        else:
            zero = -minimum / np.where(scale == 0, 1, scale) - middle
            part[...] = np.rint(zero) if part.dtype == np.int16 else zero


def _fill_packed(
    path: Path, weight: PackedWeight, dense: ParamSpec, window: Window, rows: QuantizedRows, read: Fill, out: Array
) -> None:
    """Write the strips of a window of a CPU's layout `[*outer, strips, blocks, run]`."""
    spec = flat_inputs(dense)
    *outer, strips, blocks, _ = window
    inner = spec.shape[len(outer) + 1 : -1]
    columns = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
    width = columns.stop - columns.start
    each = STRIP / math.prod(inner)
    split = slice(round(strips.start * each), round(strips.stop * each))
    outputs = (*outer, split, *(slice(0, size) for size in inner))
    target = out.reshape(-1, *out.shape[-2:], copy=False)
    done = 0
    for part, _ in row_windows(outputs, BLOCK_ELEMENTS // width, STRIP):
        shape = [one.stop - one.start for one in part]
        packed = target[done : done + math.prod(shape) // STRIP]
        done += len(packed)
        if weight.scheme is None:
            values = np.zeros((*shape, width), dense.dtype)
            for stored, inside in spec.windows((*part, columns)):
                read_flat(read, path, dense, stored, values[inside])
            pack_dense(values.reshape(-1, width), packed)
            continue
        numbers = np.zeros((*shape, width), np.uint8)
        factors = np.zeros((*shape, width // BLOCK), FACTORS)
        for stored, inside in spec.windows((*part, columns)):
            *stored_rows, last = stored
            rows.numbers(path, stored, numbers[inside])
            units = slice(last.start // BLOCK, last.stop // BLOCK)
            rows.factors(path, (*stored_rows, units), BLOCK, factors[inside[:-1]])
        pack_numbers(numbers.reshape(-1, width), factors.reshape(-1, width // BLOCK), weight.format, packed)
    assert done == len(target), (path, window)
