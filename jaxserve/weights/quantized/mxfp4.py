"""gpt-oss' experts in MXFP4 (OCP Microscaling Formats 1.0) as a `QuantizedSource`.

A weight `NAME`, `[experts, out, in]`, is stored in two tensors:

- `NAME_blocks`, uint8 `[experts, out, in / 32, 16]`: two numbers a byte, the first in its low four bits;
- `NAME_scales`, uint8 `[experts, out, in / 32]`: the biased exponent of the power of two that 32 inputs share; 255 is
  NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import Window
from jaxserve.quant import CheckpointQuantization, Stored, StoredWeight
from jaxserve.quant.stored import MXFP4_GROUP
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.scales import check_weight_scales
from jaxserve.weights.source import TensorInfo, row_blocks
from pallas_kernels.quantized_matmul import FP4_VALUES

Array = np.ndarray[Any, Any]

_BIAS = 127
_NAN = 255
_MAGNITUDES = 0x77
"""The bits of two numbers without their signs."""
_SUFFIXES = ("_blocks", "_scales")


class Mxfp4Folder:
    """The tensors of a folder whose experts are in MXFP4."""

    def __init__(self, folder: SafetensorsFolder, quantization: CheckpointQuantization) -> None:
        self._folder = folder
        self._stored: dict[str, StoredWeight] = {}
        self._infos = dict(folder.infos)
        for name in sorted({name[: -len("_blocks")] for name in folder.infos if name.endswith(_SUFFIXES)}):
            stored = quantization.stored(name)
            if stored is not None:
                for suffix in _SUFFIXES:
                    self._infos.pop(name + suffix, None)
                self._infos[name] = self._info(name, stored)
                self._stored[name] = stored

    def _info(self, name: str, stored: StoredWeight) -> TensorInfo:
        blocks, scales = (self._folder.infos.get(name + suffix) for suffix in _SUFFIXES)
        if blocks is None or scales is None:
            return TensorInfo((), stored.type, f"{name}{_SUFFIXES[scales is None]} is missing")
        if len(blocks.shape) != 4:
            return TensorInfo((), stored.type, f"{name}_blocks has shape {list(blocks.shape)}", quantized=True)
        shape = (*blocks.shape[:-2], blocks.shape[-2] * MXFP4_GROUP)
        problem = ""
        if {blocks.stored_type, scales.stored_type} != {"U8"}:
            problem = f"its types are {blocks.stored_type} and {scales.stored_type} instead of U8"
        elif blocks.shape != (*shape[:-1], shape[-1] // MXFP4_GROUP, MXFP4_GROUP // 2):
            problem = f"{name}_blocks has shape {list(blocks.shape)}"
        elif scales.shape != blocks.shape[:-1]:
            problem = f"{name}_scales has shape {list(scales.shape)} instead of {list(blocks.shape[:-1])}"
        return TensorInfo(shape, stored.type, problem, quantized=True)

    @property
    def description(self) -> str:
        return self._folder.description

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    @property
    def stored(self) -> Stored:
        """How each tensor is stored."""
        return {name: StoredWeight(info.stored_type) for name, info in self._infos.items()} | self._stored

    def read(self, name: str, window: Window, out: Array) -> None:
        """See `TensorSource`."""
        if name not in self._stored:
            self._folder.read(name, window, out)
            return
        for block, part in row_blocks(window, out):
            numbers, factors = np.empty(part.shape, np.uint8), np.empty(part.shape, np.float32)
            self.read_numbers(name, block, numbers)
            factors[...] = self._scales(name, block, 1)
            part[...] = FP4_VALUES[numbers] * factors

    def read_numbers(self, name: str, window: Window, out: Array) -> None:
        """See `QuantizedSource`."""
        stored = self._folder.array(f"{name}_blocks")
        stored = stored.reshape(*stored.shape[:2], -1)
        for (*rows, columns), part in row_blocks(window, out):
            first, last = columns.start // 2, -(-columns.stop // 2)
            packed = stored[(*rows, slice(first, last))]
            numbers = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
            np.bitwise_and(packed, 15, out=numbers[..., ::2])
            np.right_shift(packed, 4, out=numbers[..., 1::2])
            part[...] = numbers[..., columns.start - 2 * first : columns.stop - 2 * first]

    def read_factors(self, name: str, window: Window, unit: int, out: Array) -> None:
        """See `QuantizedSource`."""
        for block, part in row_blocks(window, out):
            part["scale"] = self._scales(name, block, unit)
            part["minimum"] = 0

    def _scales(self, name: str, window: Window, unit: int) -> Array:
        """Return the scale of each `unit` inputs of a window. Raises `ConfigError` for NaN and unusable scales."""
        *rows, units = window
        groups = np.arange(units.start, units.stop) * unit // MXFP4_GROUP
        read = (*rows, slice(groups[0], groups[-1] + 1))
        exponents = self._folder.array(f"{name}_scales")[read]
        if (exponents == _NAN).any():
            raise ConfigError(f"{self.description}: tensor {name} holds NaN: the file is damaged; fetch it again")
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)

        def are_used(chosen: Array) -> Array:
            return (self._folder.array(f"{name}_blocks")[read][chosen] & _MAGNITUDES).any(axis=-1)

        check_weight_scales(scales, f"{name}_scales", self.description, are_used)
        return scales[..., groups - groups[0]]

    def read_order(self, name: str) -> Array | None:
        """See `QuantizedSource`."""
        return None

    def read_input_scale(self, name: str) -> float:
        """See `QuantizedSource`."""
        raise AssertionError(f"{name}: inputs of MXFP4 are not quantized")
