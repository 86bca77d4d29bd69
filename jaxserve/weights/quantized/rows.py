"""Reads quantized weights as rows of numbers and factors, whether a checkpoint has them or they are quantized now.

Windows are of the weight with one dimension of inputs (`quant.flat_inputs`), as a checkpoint stores it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxserve.params import ParamSpec, Path, TensorPart, Window
from jaxserve.quant import flat_inputs
from jaxserve.weights.arrays import Fill
from jaxserve.weights.parts import Parts, Tensors, fill_window
from jaxserve.weights.source import BLOCK_ELEMENTS, QuantizedSource
from pallas_kernels.quantized_matmul import FACTORS, FP4_VALUES, HeldWeight, Scheme

Array = np.ndarray[Any, Any]


_MIDDLE = np.float32(128)
_FP4_TWICE = (2 * FP4_VALUES + _MIDDLE).astype(np.uint8)
"""Twice the 4-bit floats, as unsigned int8."""


class QuantizedRows(Protocol):
    """The quantized weights of a model, by path. Any thread may read."""

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """Write the numbers of a window into `out`, uint8: integers unsigned, fp8 and fp4 as their bits."""

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """Write the factors of a window into `out`, `FACTORS`; its last dimension counts `unit` inputs as one."""

    def order(self, path: Path) -> Array:
        """Return the order of the inputs, int32 `[in]`."""

    def input_scale(self, path: Path) -> float:
        """Return the scale of static activations."""


class CheckpointRows:
    """The weights that a checkpoint has quantized."""

    def __init__(
        self, source: QuantizedSource, specs: Mapping[Path, ParamSpec], held: Mapping[Path, HeldWeight]
    ) -> None:
        self._source = source
        self._parts = {path: flat_inputs(spec).parts for path, spec in specs.items()}
        self._in_units = functools.cache(self._find_parts)
        fp4 = {path: weight.scheme for path, weight in held.items() if weight.scheme and self._is_fp4(path)}
        self._in_int8 = {path for path, scheme in fp4.items() if scheme.numbers == "int8"}

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """See `QuantizedRows`."""
        infos = self._source.infos
        tensors = Tensors(lambda name: infos[name].shape, self._source.read_numbers, self._is_quantized)
        fill_window(tensors, self._in_units(path, 1), window, out)
        if path in self._in_int8:
            out[...] = _FP4_TWICE[out]

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """See `QuantizedRows`."""

        def shape(name: str) -> tuple[int, ...]:
            *rows, inputs = self._source.infos[name].shape
            return *rows, inputs // unit

        def read(name: str, window: Window, out: Array) -> None:
            self._source.read_factors(name, window, unit, out)

        fill_window(Tensors(shape, read, self._is_quantized), self._in_units(path, unit), window, out)
        if path in self._in_int8:
            out["scale"] /= 2
            out["minimum"] = -_MIDDLE * out["scale"]

    def _find_parts(self, path: Path, unit: int) -> Parts:
        """Return the parts of a weight, with `unit` inputs as one."""
        return Parts([_in_units(part, unit) for part in self._parts[path]])

    def _is_quantized(self, name: str) -> bool:
        return self._source.infos[name].quantized

    def _is_fp4(self, path: Path) -> bool:
        stored = self._source.stored.get(self._parts[path][0].name)
        return stored is not None and stored.scheme is not None and stored.scheme.numbers == "fp4"

    def order(self, path: Path) -> Array:
        """See `QuantizedRows`. All tensors of a weight have the same order."""
        found = self._source.read_order(self._parts[path][0].name)
        assert found is not None, path
        return found

    def input_scale(self, path: Path) -> float:
        """See `QuantizedRows`. The largest scale fits all tensors of a weight."""
        return max(self._source.read_input_scale(part.name) for part in self._parts[path])


class RowsOnTheFly:
    """Weights of 16 bits that `fill` reads and that are quantized here, each row on its own."""

    def __init__(self, fill: Fill, specs: Mapping[Path, ParamSpec], held: Mapping[Path, HeldWeight]) -> None:
        self._fill = fill
        self._specs = specs
        self._held = held
        self._inputs = {path: flat_inputs(specs[path]).shape[-1] for path in held}

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """See `QuantizedRows`."""
        *rows, columns = window
        for values, scheme, part in self._pieces(path, tuple(rows), columns, out):
            chosen = values if scheme.group else values[..., columns]
            part[...] = row_numbers(chosen, row_factors(values, scheme), scheme)

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """See `QuantizedRows`."""
        *rows, units = window
        columns = slice(units.start * unit, units.stop * unit)
        for values, scheme, part in self._pieces(path, tuple(rows), columns, out):
            groups = np.arange(units.stop - units.start) * unit // (scheme.group or self._inputs[path])
            part[...] = row_factors(values, scheme)[..., groups]

    def order(self, path: Path) -> Array:
        """See `QuantizedRows`. Only random weights for a checkpoint that has an order are reordered."""
        return np.arange(self._inputs[path], dtype=np.int32)

    def input_scale(self, path: Path) -> float:
        """See `QuantizedRows`. Only random weights for a checkpoint that has the scale need one."""
        return 0.05

    def _pieces(self, path: Path, rows: Window, columns: slice, out: Array) -> Iterator[tuple[Array, Scheme, Array]]:
        """Yield the weights `[*out, in]` of these columns, piece by piece, with their scheme and their part of `out`.

        Without groups, yields whole rows, whose weights have a scale in common.
        """
        spec, scheme = self._specs[path], self._held[path].scheme
        assert scheme is not None, path
        if scheme.group is None:
            columns = slice(0, self._inputs[path])
        else:
            # The last group of a row may be shorter, and shards may cut a group of random weights. So numbers and
            # factors of a weight must be asked for by the same columns.
            scheme = dataclasses.replace(scheme, group=math.gcd(scheme.group, columns.start, columns.stop))
        width = columns.stop - columns.start
        for piece, inside in row_windows(rows, BLOCK_ELEMENTS // width):
            values = np.empty([*(part.stop - part.start for part in piece), width], spec.dtype)
            read_flat(self._fill, path, spec, (*piece, columns), values)
            yield values, scheme, out[inside]


def row_factors(values: Array, scheme: Scheme) -> Array:
    """Return the factors of weights `[*out, in]` of any float type, `FACTORS` `[*out, groups]`.

    With zeros, a group's numbers cover zero and the range from its least to its greatest weight; without zeros, they
    cover its greatest magnitude on both sides. Scales of integers are rounded to bfloat16.
    """
    grouped = _grouped(values, scheme)
    # Floats are compared as integers, several times as fast: the greatest is the greatest signed integer; the order of
    # unsigned integers is by the sign bit, then by the magnitude
    signed, unsigned = (grouped.view(f"{kind}{grouped.itemsize}").max(axis=-1) for kind in "iu")
    greatest = np.maximum(signed, 0).view(values.dtype).astype(np.float32)
    least = (unsigned * (unsigned >> (8 * grouped.itemsize - 1))).view(values.dtype).astype(np.float32)
    factors = np.zeros(least.shape, FACTORS)
    magnitude = np.maximum(-least, greatest)
    if scheme.numbers == "fp8":
        factors["scale"] = np.maximum(magnitude / 448, np.finfo(np.float32).tiny)
        return factors
    most = (1 << scheme.bits) - 1
    scale = _as_bf16((greatest - least) / most if scheme.zeros else magnitude / (most // 2))
    zero = np.clip(np.round(-least / scale), 0, most) if scheme.zeros else np.float32(most // 2 + 1)
    factors["scale"], factors["minimum"] = scale, -scale * zero
    return factors


def row_numbers(values: Array, factors: Array, scheme: Scheme) -> Array:
    """Return the nearest numbers of weights `[*out, in]` of any float type with these factors, uint8."""
    scale = factors["scale"][..., None]
    grouped = _grouped(values.astype(np.float32), scheme)
    grouped /= scale
    if scheme.numbers == "fp8":
        return _fp8_bits(grouped).reshape(values.shape)
    numbers = np.rint(grouped, out=grouped).astype(np.int16)
    numbers -= (factors["minimum"][..., None] / scale).astype(np.int16)
    np.clip(numbers, 0, (1 << scheme.bits) - 1, out=numbers)
    return numbers.astype(np.uint8).reshape(values.shape)


def _grouped(values: Array, scheme: Scheme) -> Array:
    return values.reshape(*values.shape[:-1], -1, scheme.group or values.shape[-1])


def _fp8_bits(values: Array) -> Array:
    """Return the nearest float8_e4m3fn of float32 numbers in its range, as bits. The numbers are overwritten.

    It takes a fraction of the time of `astype`.
    """
    sign = np.signbit(values).view(np.uint8) << 7
    np.abs(values, out=values)
    # The power of two of each number, at least the smallest normal one of fp8
    power = np.maximum(values, np.float32(2**-6))
    power.view(np.uint32)[...] &= 0xFF << 23
    # The sum with its 2**20-fold rounds the number to four bits, of which fp8 counts the first one in the exponent
    power *= 2**20
    values += power
    bits, exponent = values.view(np.uint32), power.view(np.uint32)
    exponent >>= 20
    bits += exponent
    return bits.astype(np.uint8) - np.uint8((127 - 6 + 20 << 3) % 256) | sign


def _as_bf16(scale: Array) -> Array:
    """Return scales rounded to bfloat16; zeros become the least normal one."""
    rounded = np.maximum(scale, np.finfo(np.float32).tiny).astype(ml_dtypes.bfloat16)
    return rounded.astype(np.float32)


def _in_units(part: TensorPart, unit: int) -> TensorPart:
    *shape, inner = part.shape
    *index, start = part.index
    assert (inner % unit, start % unit) == (0, 0), part
    view = part.quantized_view
    if view is not None:
        view = view._replace(shape=(*view.shape[:-1], inner // unit))
    return dataclasses.replace(part, shape=(*shape, inner // unit), index=(*index, start // unit), quantized_view=view)


def read_flat(read: Fill, path: Path, dense: ParamSpec, window: Window, out: Array) -> None:
    """Read a window with one dimension of inputs of a weight that may have several."""
    *outputs, columns = window
    dims = dense.stored_shape[len(outputs) :]
    # Shards divide the inputs by whole heads, or the inputs of one head among replicas: a shard is a box in each case
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


def row_windows(outputs: Window, most: int, unit: int = 1) -> Iterator[tuple[Window, Window]]:
    """Yield windows that together cover a window of outputs, in order, each with its window inside that one.

    Each has about `most` outputs, in multiples of `unit`.
    """
    shape = [one.stop - one.start for one in outputs]
    axis = next(i for i in range(len(shape)) if i == len(shape) - 1 or math.prod(shape[i + 1 :]) <= most)
    while math.prod(shape[axis:]) % unit:
        axis -= 1
    inner = math.prod(shape[axis + 1 :])
    unit //= math.gcd(inner, unit)
    step = max(1, most // inner // unit) * unit
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            chosen = (slice(i, i + 1) for i in outer)
            stop = min(start + step, shape[axis])
            inside = *chosen, slice(start, stop), *(slice(0, size) for size in shape[axis + 1 :])
            yield tuple(slice(w.start + i.start, w.start + i.stop) for w, i in zip(outputs, inside)), inside
