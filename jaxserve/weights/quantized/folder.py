"""A quantized Hugging Face folder as a `QuantizedSource`: each weight has one name, whatever tensors it is made of."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.params import Window
from jaxserve.quant import CheckpointQuantization, Stored, StoredWeight
from jaxserve.weights.arrays import THREADS
from jaxserve.weights.finite import check_finite
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.quantized.tensors import FP8, WEIGHT_SUFFIX, QuantizedTensor
from jaxserve.weights.scales import check_weight_scales
from jaxserve.weights.source import TensorInfo, row_blocks

_QUANTIZED_TYPES = ("I8", "F8_E4M3")
_FP8_NAN = 0x7F
_KEPT = 2 * THREADS


class QuantizedFolder:
    """The tensors of a folder whose config has a `quantization_config`."""

    def __init__(self, folder: SafetensorsFolder, quantization: CheckpointQuantization) -> None:
        self._folder = folder
        self._quantized = _quantized_tensors(folder, quantization)
        hidden = {f"{one.module}.{name}" for one in self._quantized.values() for name in one.used}
        # A transposed weight is large next to a window, and several windows need it
        self._transposed = functools.lru_cache(_KEPT)(lambda name: self._quantized[name].all_numbers())
        self._factors = functools.lru_cache(_KEPT)(self._read_factors)
        self._infos = {name: info for name, info in folder.infos.items() if name not in hidden}
        for name, one in self._quantized.items():
            self._infos[name] = TensorInfo(one.shape, one.stored.type, one.problem)

    @property
    def description(self) -> str:
        return self._folder.description

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros beside a quantized weight, as GPTQ's tools write."""
        module, _, last = name.rpartition(".")
        return last == "bias" and f"{module}.weight" in self._quantized and not self._folder.array(name).any()

    @functools.cached_property
    def stored(self) -> Stored:
        """How each tensor is stored. Raises nothing for a tensor that can't be read, which `infos` tells."""
        return {name: one.refined if not one.problem else one.stored for name, one in self._quantized.items()} | {
            name: StoredWeight(info.stored_type) for name, info in self._infos.items() if name not in self._quantized
        }

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `TensorSource`: quantized weights are dequantized, in float32 before they are converted."""
        if name not in self._quantized:
            self._folder.read(name, window, out)
            return
        one = self._quantized[name]
        groups = one.groups_of_inputs[window[1]]
        for (rows, columns), part in row_blocks(window, out):
            q = self._numbers(name, rows, columns)
            values = q.view(FP8).astype(np.float32) if one.is_fp8 else q.astype(np.float32)
            factors = self._factors(name)[rows][:, groups]
            values *= factors["scale"]
            values += factors["minimum"]
            part[...] = values

    def read_numbers(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `QuantizedSource`."""
        one = self._quantized[name]
        for (rows, columns), part in row_blocks(window, out):
            part[...] = self._numbers(name, rows, columns if one.order is None else one.order[columns])

    def read_factors(self, name: str, window: Window, unit: int, out: np.ndarray[Any, Any]) -> None:
        """See `QuantizedSource`."""
        one = self._quantized[name]
        rows, units = window
        assert one.stored.scheme is not None, name
        size = one.stored.scheme.group or one.shape[1]
        groups = np.arange(units.start, units.stop) * unit // size
        out[...] = self._factors(name)[rows][:, groups]

    def read_order(self, name: str) -> np.ndarray[Any, Any] | None:
        """See `QuantizedSource`."""
        return self._quantized[name].order

    def read_input_scale(self, name: str) -> float:
        """See `QuantizedSource`."""
        return self._quantized[name].input_scale

    def _numbers(self, name: str, rows: slice, columns: slice | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return numbers in the order of the file. Raises `ConfigError` for NaN, which only fp8 has."""
        one = self._quantized[name]
        if one.lies_across:
            return self._transposed(name)[rows, columns]
        found = one.numbers(rows, columns)
        if one.is_fp8 and ((found & _FP8_NAN) == _FP8_NAN).any():
            raise ConfigError(f"{self.description}: tensor {name} holds NaN: the file is damaged; fetch it again")
        return found

    def _read_factors(self, name: str) -> np.ndarray[Any, Any]:
        one = self._quantized[name]
        found = one.factors()
        for factor in ("scale", "minimum"):
            check_finite(np.ascontiguousarray(found[factor]), f"{name} (its scales)", self.description)
        # float16 rounds the scales of groups of tiny weights to 0, but hardly all scales of a tensor
        is_rounded = one.scale_type == np.float16 and found["scale"].any()
        where = f"{one.module}.{one.scale_name}"
        check_weight_scales(found["scale"], where, self.description, None if is_rounded else one.are_used)
        return found


def _quantized_tensors(folder: SafetensorsFolder, quantization: CheckpointQuantization) -> dict[str, QuantizedTensor]:
    """Return the quantized weights of a folder, by the name that a weight that isn't quantized would have."""
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in folder.infos.items():
        module, _, last = name.rpartition(".")
        modules[module][last] = info
    found = {}
    for module, tensors in modules.items():
        name = f"{module}.weight"
        stored = quantization.stored(name) or quantization.rules[0].stored
        weight = tensors.get(WEIGHT_SUFFIX[stored.packing])
        is_quantized = weight is not None and (stored.packing != "plain" or weight.stored_type in _QUANTIZED_TYPES)
        if weight is not None and is_quantized and len(weight.shape) == 2:
            types = {last: one.stored_type for last, one in tensors.items()}
            shapes = {last: one.shape for last, one in tensors.items()}
            block = quantization.block[0] if quantization.block and stored.packing == "plain" else 1
            found[name] = QuantizedTensor(module, stored, types, shapes, folder, block)
    return found
