"""Reads quantized weights as rows of numbers and factors, whether a checkpoint has them or they are quantized now.

Windows are of the weight with one dimension of inputs (`quant.flat_inputs`), as a checkpoint stores it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxserve.params import ParamSpec, Path, TensorPart, Window
from jaxserve.quant import flat_inputs
from jaxserve.weights.arrays import Fill
from jaxserve.weights.parts import Tensors, fill_window
from jaxserve.weights.source import QuantizedSource
from pallas_kernels.quantized_matmul import FACTORS, HeldWeight, Scheme

Array = np.ndarray[Any, Any]


class QuantizedRows(Protocol):
    """The quantized weights of a model, by path. Any thread may read."""

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """Write the numbers of a window into `out`, uint8: integers unsigned, fp8 as its bits."""

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """Write the factors of a window into `out`, `FACTORS`; its last dimension counts `unit` inputs as one."""

    def order(self, path: Path) -> Array:
        """Return the order of the inputs, int32 `[in]`."""

    def input_scale(self, path: Path) -> float:
        """Return the scale of static activations."""


class CheckpointRows:
    """Those of a checkpoint."""

    def __init__(self, source: QuantizedSource, specs: Mapping[Path, ParamSpec]) -> None:
        self._source = source
        self._parts = {path: flat_inputs(spec).parts for path, spec in specs.items()}

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """See `QuantizedRows`."""
        tensors = Tensors(lambda name: self._source.infos[name].shape, self._source.read_numbers)
        fill_window(tensors, self._parts[path], window, out)

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """See `QuantizedRows`."""

        def shape(name: str) -> tuple[int, ...]:
            *rows, inputs = self._source.infos[name].shape
            return *rows, inputs // unit

        def read(name: str, window: Window, out: Array) -> None:
            self._source.read_factors(name, window, unit, out)

        parts = [_in_units(part, unit) for part in self._parts[path]]
        fill_window(Tensors(shape, read), parts, window, out)

    def order(self, path: Path) -> Array:
        """See `QuantizedRows`. All tensors of a weight have the same one."""
        found = self._source.read_order(self._parts[path][0].name)
        assert found is not None, path
        return found

    def input_scale(self, path: Path) -> float:
        """See `QuantizedRows`. The largest one fits all tensors of a weight."""
        return max(self._source.read_input_scale(part.name) for part in self._parts[path])


class RowsOnTheFly:
    """Those of weights of 16 bits that `fill` reads and that are quantized here, each row on its own."""

    def __init__(self, fill: Fill, specs: Mapping[Path, ParamSpec], held: Mapping[Path, HeldWeight]) -> None:
        self._fill = fill
        self._specs = specs
        self._held = held

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """See `QuantizedRows`."""
        values, scheme = self._rows(path, window)
        out[...] = row_numbers(values, row_factors(values, scheme), scheme)[..., window[-1]]

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """See `QuantizedRows`."""
        factors = row_factors(*self._rows(path, window))
        spec = flat_inputs(self._specs[path])
        of_units = np.arange(window[-1].start, window[-1].stop) * unit * factors.shape[-1] // spec.shape[-1]
        out[...] = factors[..., of_units]

    def order(self, path: Path) -> Array:
        """See `QuantizedRows`. Only made-up weights of a checkpoint that has an order are reordered."""
        return np.arange(flat_inputs(self._specs[path]).shape[-1], dtype=np.int32)

    def input_scale(self, path: Path) -> float:
        """See `QuantizedRows`. Only made-up weights of a checkpoint that has it need one."""
        return 0.05

    def _rows(self, path: Path, window: Window) -> tuple[Array, Scheme]:
        """Return whole rows in float32, `[*out, in]`, and their scheme."""
        spec, scheme = self._specs[path], self._held[path].scheme
        assert scheme is not None, path
        if scheme.group is not None:  # the last group of a checkpoint's rows may be shorter
            scheme = dataclasses.replace(scheme, group=math.gcd(scheme.group, flat_inputs(spec).shape[-1]))
        inner = spec.stored_shape[len(window) - 1 :]
        rows = (*window[:-1], *(slice(0, size) for size in inner))
        values = np.empty([part.stop - part.start for part in rows], spec.dtype)
        self._fill(path, spec, rows, values)
        return values.reshape(*values.shape[: len(window) - 1], -1).astype(np.float32), scheme


def row_factors(values: Array, scheme: Scheme) -> Array:
    """Return the factors of float32 weights `[*out, in]`, `FACTORS` `[*out, groups]`.

    With zeros, a group's numbers reach from its least to its greatest weight, and to zero; without, to its greatest
    magnitude. Scales are rounded up to bfloat16, if they are of integers.
    """
    grouped = _grouped(values, scheme)
    factors = np.zeros(grouped.shape[:-1], FACTORS)
    least, greatest = np.minimum(grouped.min(axis=-1), 0), np.maximum(grouped.max(axis=-1), 0)
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
    """Return the nearest numbers of float32 weights `[*out, in]` with these factors, uint8. Overwrites `values`."""
    grouped = _grouped(values, scheme)
    scale = factors["scale"][..., None]
    grouped /= scale
    if scheme.numbers == "fp8":
        np.clip(grouped, -448, 448, out=grouped)
        return grouped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(values.shape)
    np.rint(grouped, out=grouped)
    grouped -= factors["minimum"][..., None] / scale
    np.clip(grouped, 0, (1 << scheme.bits) - 1, out=grouped)
    return grouped.astype(np.uint8).reshape(values.shape)


def _grouped(values: Array, scheme: Scheme) -> Array:
    return values.reshape(*values.shape[:-1], -1, scheme.group or values.shape[-1])


def _as_bf16(scale: Array) -> Array:
    """Round scales up to bfloat16, so that no number exceeds its range, and zeros to the least one."""
    rounded = np.maximum(scale, np.finfo(np.float32).tiny).astype(ml_dtypes.bfloat16)
    return rounded.astype(np.float32)


def _in_units(part: TensorPart, unit: int) -> TensorPart:
    *shape, inner = part.shape
    *index, start = part.index
    assert (inner % unit, start % unit) == (0, 0), part
    return dataclasses.replace(part, shape=(*shape, inner // unit), index=(*index, start // unit))
