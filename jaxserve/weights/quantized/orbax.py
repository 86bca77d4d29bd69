"""The weights that `jaxserve convert --quantization` has written, as `QuantizedRows`, and dequantized."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.params import ParamSpec, Path, Window, dotted
from jaxserve.weights.arrays import Fill
from jaxserve.weights.scales import check_weight_scales
from pallas_kernels.quantized_matmul import FACTORS, QuantizedWeight

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class OrbaxRows:
    """The quantized weights of the checkpoint in folder `where`, `held` by path, whose arrays `fill` reads."""

    held: Mapping[Path, QuantizedWeight]
    fill: Fill
    where: str

    def numbers(self, path: Path, window: Window, out: Array) -> None:
        """See `QuantizedRows`."""
        weight = self.held[path]
        *rows, last = window
        per_unit = 2 if weight.scheme.numbers == "int4" else 1
        units = slice(last.start // per_unit, last.stop // per_unit)
        stored = np.empty((*out.shape[:-1], units.stop - units.start), weight.numbers.dtype)
        self.fill((*path, "numbers"), weight.numbers, (*rows, units), stored)
        if weight.scheme.numbers == "int4":
            out[..., ::2], out[..., 1::2] = stored & 15 ^ 8, stored >> 4 ^ 8
        else:
            out[...] = stored.view(np.uint8) ^ np.uint8(0x80 if weight.scheme.numbers == "int8" else 0)

    def factors(self, path: Path, window: Window, unit: int, out: Array) -> None:
        """See `QuantizedRows`."""
        weight = self.held[path]
        *rows, units = window
        group = weight.scheme.group or weight.shape[-1]
        groups = np.arange(units.start, units.stop) * unit // group
        read = (*rows, slice(int(groups[0]), int(groups[-1]) + 1))
        scale, zero = (self._read(path, name, read) for name in ("scale", "zero"))
        middle = 0 if weight.scheme.numbers == "fp8" else 1 << (weight.scheme.bits - 1)
        # No scale may be 0: `jaxserve convert` writes the smallest usable one where all weights are 0
        check_weight_scales(scale, f"{dotted(path)}.scale", self.where, lambda chosen: np.ones(chosen.sum(), np.bool_))
        out["scale"] = scale[..., groups - groups[0]]
        out["minimum"] = (-scale * (zero + middle))[..., groups - groups[0]]

    def order(self, path: Path) -> Array:
        """See `QuantizedRows`."""
        raise AssertionError(path)

    def input_scale(self, path: Path) -> float:
        """See `QuantizedRows`."""
        raise AssertionError(path)

    def fill_dense(self, path: Path, spec: ParamSpec, window: Window, out: Array) -> None:
        """Write a window of a parameter, dequantized if it is quantized."""
        if path not in self.held:
            self.fill(path, spec, window, out)
            return
        weight = self.held[path]
        dims = spec.shape[len(weight.shape) - 1 :]
        rows, box = window[: len(weight.shape) - 1], window[len(weight.shape) - 1 :]
        start = int(np.ravel_multi_index([part.start for part in box], dims))
        columns = slice(start, start + math.prod(part.stop - part.start for part in box))
        shape = [part.stop - part.start for part in (*rows, columns)]
        unit = math.gcd(weight.scheme.group or weight.shape[-1], columns.start, columns.stop)
        numbers, factors = np.empty(shape, np.uint8), np.empty((*shape[:-1], shape[-1] // unit), FACTORS)
        self.numbers(path, (*rows, columns), numbers)
        self.factors(path, (*rows, slice(columns.start // unit, columns.stop // unit)), unit, factors)
        q = numbers.view(ml_dtypes.float8_e4m3fn) if weight.scheme.numbers == "fp8" else numbers
        grouped = q.astype(np.float32).reshape(*factors.shape, unit)
        values = grouped * factors["scale"][..., None] + factors["minimum"][..., None]
        out[...] = values.reshape(out.shape)

    def _read(self, path: Path, name: str, window: Window) -> Array:
        spec = getattr(self.held[path], name)
        shape = [part.stop - part.start for part in window]
        if spec is None:
            return np.zeros(shape, np.float32)
        found = np.empty(shape, spec.dtype)
        self.fill((*path, name), spec, window, found)
        return found.astype(np.float32)
