"""Fills quantized and packed weights (`quant.transform`): reads parts that fit in a core's cache, and packs them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxserve.params import ParamSpec, Path, Window
from jaxserve.quant import EMBEDDING, HEAD, flat_inputs, held_weights
from jaxserve.weights.arrays import Fill, WeightReader, flatten
from jaxserve.weights.quantized.rows import QuantizedRows, RowsOnTheFly
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
    return WeightReader(fill, tuple(sorted(range(len(owners)), key=lambda i: rank[owners[i]])))


def _fill_component(
    path: Path, name: str, weight: QuantizedWeight, dense: ParamSpec, window: Window, rows: QuantizedRows, out: Array
) -> None:
    """Write a window of the numbers, the scales or the zeros of a weight, in their stored units."""
    scheme = weight.scheme
    inputs = flat_inputs(dense).shape[-1]
    *outer, last = window
    if name == "numbers":
        per_unit = 2 if scheme.numbers == "int4" else 1
        columns = slice(last.start * per_unit, last.stop * per_unit)
        for outputs, part in _row_blocks(tuple(outer), out, columns.stop - columns.start):
            numbers = np.empty((*part.shape[:-1], columns.stop - columns.start), np.uint8)
            rows.numbers(path, (*outputs, columns), numbers)
            if weight.arrangement:
                runs = numbers.reshape(*numbers.shape[:-1], -1, len(weight.arrangement))
                numbers = np.take(runs, weight.arrangement, axis=-1).reshape(numbers.shape)
            if scheme.numbers == "int4":
                signed = numbers ^ 8
                part[...] = signed[..., ::2] | signed[..., 1::2] << 4
            else:
                part.view(np.uint8)[...] = numbers ^ 0x80 if scheme.numbers == "int8" else numbers
        return
    for outputs, part in _row_blocks(tuple(outer), out, inputs):
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
    for part in _strip_windows(outputs, BLOCK_ELEMENTS // width):
        shape = [one.stop - one.start for one in part]
        packed = target[done : done + math.prod(shape) // STRIP]
        done += len(packed)
        if weight.scheme is None:
            values = np.zeros((*shape, width), dense.dtype)
            for stored, inside in spec.windows((*part, columns)):
                _read_flat(read, path, dense, stored, values[inside])
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


def _read_flat(read: Fill, path: Path, dense: ParamSpec, window: Window, out: Array) -> None:
    """Read a window with one dimension of inputs of a weight that may have several."""
    *outputs, columns = window
    dims = dense.stored_shape[len(outputs) :]
    # Shards divide the inputs by whole heads, or those of one head among replicas: a box in each case
    box, size = [], math.prod(dims)
    start, stop = columns.start, columns.stop
    for length in dims:
        size //= length
        box.append(slice(start // size, -(-stop // size)))
        start, stop = start - box[-1].start * size, stop - box[-1].start * size
        if box[-1].stop - box[-1].start > 1:
            box += [slice(0, n) for n in dims[len(box) :]]
            break
    shape = [one.stop - one.start for one in (*outputs, *box)]
    assert math.prod(shape) == out.size, (path, window)
    values = out.reshape(shape) if out.flags.c_contiguous else np.empty(shape, out.dtype)
    read(path, dense, (*outputs, *box), values)
    if values.base is not out and values is not out:
        out[...] = values.reshape(out.shape)


def _row_blocks(outputs: Window, out: Array, width: int) -> Iterator[tuple[Window, Array]]:
    """Split a window of outputs along its first dimension of more than one into blocks of about `BLOCK_ELEMENTS`."""
    axis = next((i for i, one in enumerate(outputs) if one.stop - one.start > 1), 0)
    first, last = outputs[axis].start, outputs[axis].stop
    row = out[(slice(None),) * axis + (slice(0, 1),)].size // max(out.shape[-1], 1) * width
    step = max(1, BLOCK_ELEMENTS // max(1, row))
    for start in range(first, last, step):
        stop = min(start + step, last)
        inside = (slice(None),) * axis + (slice(start - first, stop - first),)
        yield (*outputs[:axis], slice(start, stop), *outputs[axis + 1 :]), out[inside]


def _strip_windows(outputs: Window, most: int) -> Iterator[Window]:
    """Yield windows of whole strips that together cover a window of outputs, in order.

    Each has about `most` outputs, and at least one strip.
    """
    shape = [one.stop - one.start for one in outputs]
    axis = next(i for i in range(len(shape)) if i == len(shape) - 1 or math.prod(shape[i + 1 :]) <= most)
    while math.prod(shape[axis:]) % STRIP:
        axis -= 1
    inner = math.prod(shape[axis + 1 :])
    unit = STRIP // math.gcd(inner, STRIP)
    step = max(1, most // inner // unit) * unit
    begin = outputs[axis].start
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            chosen = (slice(one.start + i, one.start + i + 1) for one, i in zip(outputs, outer))
            yield *chosen, slice(begin + start, begin + stop), *outputs[axis + 1 :]
