"""The quantized weights of a Hugging Face checkpoint: numbers and factors from the tensors that each is made of.

- `awq`: qweight int32 `[in, out / 8]`, whose nibbles hold outputs 0 2 4 6 1 3 5 7; qzeros `[groups, out / 8]` like it;
  scales `[groups, out]`.
- `gptq`, `gptq_v2`: qweight int32 `[in / n, out]` with n numbers of neighbouring inputs; qzeros `[groups, out / n]`, in
  `gptq` less one; scales `[groups, out]`; g_idx, the group of each input.
- `packed` (compressed-tensors): weight_packed int32 `[out, in / n]`; weight_scale `[out, groups]`; weight_zero_point
  `[out / n, groups]`; weight_g_idx.
- `plain`: weight, int8 or float8_e4m3fn `[out, in]`; weight_scale or weight_scale_inv; weight_zero_point int8
  `[out, groups]`; input_scale or activation_scale.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxserve.quant.stored import StoredWeight
from jaxserve.weights.scales import INPUT_SCALES, are_input_scales
from pallas_kernels.quantized_matmul import FACTORS

Array = np.ndarray[Any, Any]

WEIGHT_SUFFIX = {
    "awq": "qweight",
    "gptq": "qweight",
    "gptq_v2": "qweight",
    "packed": "weight_packed",
    "plain": "weight",
}
_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_FLOATS = ("F32", "F16", "BF16")
_WORDS = ("I32",)
_INDICES = ("I32", "I64")
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The place of each output of eight among the nibbles of a word."""
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Files(Protocol):
    """The tensors of a checkpoint's files."""

    def array(self, name: str) -> Array:
        """Return a tensor whose bytes are read when they are used."""


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """One weight `[out, in]`, `scale * q + minimum`, of a module of the checkpoint.

    `types` and `shapes` are those of the module's tensors in the files, by their last name. `block` is the number of
    outputs that share a scale, if several do.
    """

    module: str
    stored: StoredWeight
    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    files: Files = dataclasses.field(repr=False)
    block: int = 1

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        first, second = self.shapes[WEIGHT_SUFFIX[self.stored.packing]]
        match self.stored.packing:
            case "awq":
                return second * 8, first
            case "gptq" | "gptq_v2":
                return second, first * self._per_word
            case "packed":
                if self.shapes.get("weight_shape") == (2,) and self.types["weight_shape"] in _INDICES:
                    outputs, inputs = map(int, self._array("weight_shape"))
                    return outputs, inputs
                return first, second * self._per_word
            case _:
                return first, second

    @property
    def used(self) -> Iterator[str]:
        """The last names of the tensors that belong to the weight."""
        known = {WEIGHT_SUFFIX[self.stored.packing], "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point"}
        known |= {"weight_g_idx", "input_scale_ub", *_INPUT_SCALES, *_SCALES}
        return (name for name in self.types if name in known)

    @functools.cached_property
    def problem(self) -> str:
        """Why the weight can't be read; empty if it can."""
        kind = self.types[WEIGHT_SUFFIX[self.stored.packing]]
        if kind not in {"plain": ("F8_E4M3",) if self.is_fp8 else ("I8",)}.get(self.stored.packing, _WORDS):
            return f"its type is {kind}, and the config says {self.stored.type}"
        for name, (types, *shapes) in self._wanted().items():
            if name not in self.shapes:
                return f"{self.module}.{name} is missing"
            if self.shapes[name] not in shapes:
                return f"{self.module}.{name} has shape {list(self.shapes[name])} instead of {list(shapes[0])}"
            if self.types[name] not in types:
                return f"{self.module}.{name} has type {self.types[name]} instead of {' or '.join(types)}"
        if self._scheme.activations == "static" and not are_input_scales(np.asarray(self.input_scale)):
            return f"{self.module}.{self._input_scale} must be {INPUT_SCALES}, it is {self.input_scale:g}"
        groups, count, most = self.groups_of_inputs, self._num_groups, self._scheme.group or self.shape[1]
        wrong = groups[(groups < 0) | (groups >= count)]
        if wrong.size:
            return f"{self.module}.{self._g_idx} has group {wrong[0]} of only {count}"
        if (sizes := np.bincount(groups)).max(initial=0) > most:
            return f"{self.module}.{self._g_idx} has {sizes.max()} inputs in group {sizes.argmax()} instead of {most}"
        return ""

    def _wanted(self) -> dict[str, tuple[Any, ...]]:
        """Return the types and shapes that each tensor of the weight may have, by its last name."""
        outputs, inputs = self.shape
        groups, zeros, per_word = self._num_groups, self._scheme.zeros, self._per_word
        wanted: dict[str, tuple[Any, ...]] = {}
        single = ((1,), ()) if groups == self.block == 1 else ()
        match self.stored.packing:
            case "awq":
                wanted["scales"] = _FLOATS, (groups, outputs)
                if zeros or "qzeros" in self.shapes:
                    wanted["qzeros"] = _WORDS, (groups, outputs // per_word)
            case "gptq" | "gptq_v2":
                wanted |= {"scales": (_FLOATS, (groups, outputs)), "qzeros": (_WORDS, (groups, outputs // per_word))}
            case "packed":
                wanted["weight_packed"] = _WORDS, (outputs, -(-inputs // per_word))
                wanted["weight_scale"] = _FLOATS, (outputs, groups), *single
                if "weight_shape" in self.shapes:
                    wanted["weight_shape"] = _INDICES, (2,)
                if zeros or self._zero_point:
                    wanted["weight_zero_point"] = _WORDS, (-(-outputs // per_word), groups)
            case _:
                shapes = ((1, 1), (outputs,)) if single else ()
                wanted[self._scale] = _FLOATS, (-(-outputs // self.block), groups), *single, *shapes
                if zeros or self._zero_point:
                    wanted["weight_zero_point"] = ("I8",), (outputs, groups), *single
                if self._scheme.activations == "static":
                    wanted[self._input_scale] = _FLOATS, (), (1,)
        if self._g_idx and (self.stored.order or self._g_idx in self.shapes):
            wanted[self._g_idx] = _INDICES, (inputs,)
        return wanted

    @functools.cached_property
    def groups_of_inputs(self) -> Array:
        """The group of each input, int `[in]`."""
        if self._g_idx in self.shapes:
            found = np.asarray(self._array(self._g_idx), np.int64)
            # compressed-tensors writes -1 for inputs that are in order
            if self.stored.packing != "packed" or (found != -1).any():
                return found
        _, inputs = self.shape
        return np.arange(inputs) // (self._scheme.group or inputs)

    @functools.cached_property
    def order(self) -> Array | None:
        """The inputs in the order of their groups, int32 `[in]`; None if the file has them in that order."""
        groups = self.groups_of_inputs
        return None if (np.diff(groups) >= 0).all() else np.argsort(groups, kind="stable").astype(np.int32)

    @property
    def refined(self) -> StoredWeight:
        """How the weight is stored, with the facts that only the files tell: the order of inputs, types and zeros."""
        scheme, order = self._scheme, self.order
        groups = self.groups_of_inputs if order is None else self.groups_of_inputs[order]
        if (groups != np.arange(len(groups)) // (scheme.group or len(groups))).any():
            return dataclasses.replace(self.stored, scheme=None, type=f"{self.stored.type}, of unequal groups")
        if not scheme.zeros and not self.is_fp8 and np.any(self._zeros() != 1 << (scheme.bits - 1)):
            if scheme.activations is not None:
                return dataclasses.replace(self.stored, scheme=None, type=f"{self.stored.type}, with zeros")
            scheme = dataclasses.replace(scheme, zeros=True)
        name = "" if order is None else hashlib.sha256(order.tobytes()).hexdigest()[:16]
        return dataclasses.replace(self.stored, scheme=scheme, factors=self.scale_type, order=name)

    def numbers(self, rows: slice | Array, columns: slice | Array) -> Array:
        """Return the numbers of some outputs and inputs, uint8: integers unsigned, fp8 as its bits.

        A weight that `lies_across` has only `all_numbers`.
        """
        match self.stored.packing:
            case "packed":
                words = np.ascontiguousarray(self._array("weight_packed")[rows])
                return _unpack(words, self._scheme.bits)[:, : self.shape[1]][:, columns]
            case _:
                stored = self._array("weight")[rows, columns].view(np.uint8)
                return stored if self.is_fp8 else stored ^ np.uint8(0x80)

    @property
    def is_fp8(self) -> bool:
        """Whether the numbers are the bits of float8_e4m3fn."""
        return bool(self._scheme.numbers == "fp8")

    @property
    def lies_across(self) -> bool:
        """Whether the numbers of an input are neighbours in the file, not those of an output."""
        return self.stored.packing in ("awq", "gptq", "gptq_v2")

    def all_numbers(self) -> Array:
        """Return the numbers of a weight that `lies_across`, uint8 `[out, in]`."""
        words = np.asarray(self._array("qweight"))
        if self.stored.packing == "awq":
            nibbles = _unpack(words, 4).reshape(len(words), -1, 8)[..., _AWQ_ORDER]
            return np.ascontiguousarray(nibbles.reshape(len(words), -1).T)
        return _unpack(np.ascontiguousarray(words.T), self._scheme.bits)

    def factors(self) -> Array:
        """Return the scale and the minimum of each group, `FACTORS` `[out, groups]`."""
        outputs, _ = self.shape
        scale = self._scales()
        found = np.zeros((outputs, scale.shape[1]), FACTORS)
        found["scale"] = scale
        if not self.is_fp8:
            found["minimum"] = -found["scale"] * self._zeros()
        return found

    def are_used(self, groups: Array) -> Array:
        """Return, for each group of a mask `[out, groups]`, whether any of its weights' numbers isn't 0."""
        rows = np.flatnonzero(groups.any(axis=1))
        numbers = self.all_numbers()[rows] if self.lies_across else self.numbers(rows, slice(None))
        if self.is_fp8:
            differs = (numbers & 0x7F) != 0
        else:
            zeros = np.broadcast_to(self._zeros(), groups.shape)[rows]
            differs = numbers != zeros[:, self.groups_of_inputs]
        by_group = [differs[:, self.groups_of_inputs == i].any(axis=1) for i in range(groups.shape[1])]
        return np.stack(by_group, axis=1)[groups[rows]]

    @property
    def scale_name(self) -> str:
        """The last name of the tensor of scales."""
        return "scales" if "scales" in self.shapes else self._scale

    @property
    def scale_type(self) -> np.dtype[Any]:
        """The type of the scales in the files."""
        return np.dtype(self._array(self.scale_name).dtype)

    @property
    def input_scale(self) -> float:
        """The factor of static activations."""
        return float(np.asarray(self._array(self._input_scale), np.float32).reshape(()))

    def _scales(self) -> Array:
        """Return the scales in float32, `[out, groups]`."""
        outputs, _ = self.shape
        if self.stored.packing in ("awq", "gptq", "gptq_v2"):
            return np.asarray(self._array("scales"), np.float32).T
        stored = np.asarray(self._array(self._scale), np.float32)
        if self.block > 1:
            return np.repeat(stored, self.block, axis=0)[:outputs]
        rows = stored.reshape(-1, stored.shape[1] if stored.ndim == 2 else 1)
        return np.broadcast_to(rows, (outputs, rows.shape[1]))

    def _zeros(self) -> Any:
        """Return the zeros of unsigned numbers, `[out, groups]` or a number for all."""
        bits, outputs = self._scheme.bits, self.shape[0]
        middle = np.float32(1 << (bits - 1))
        match self.stored.packing:
            case "awq" if "qzeros" in self.shapes:
                words = np.asarray(self._array("qzeros"))
                return _unpack(words, 4).reshape(len(words), -1, 8)[..., _AWQ_ORDER].reshape(len(words), -1).T
            case "gptq" | "gptq_v2":
                words = np.asarray(self._array("qzeros")).view(np.uint32)
                if self.stored.packing == "gptq":
                    # Every number is stored less one, with a borrow from the next one where the zero is 0
                    words = words + np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
                return _unpack(words, bits).T.astype(np.float32)
            case "packed" if self._zero_point:
                words = np.ascontiguousarray(np.asarray(self._array("weight_zero_point")).T)
                return _unpack(words, bits)[:, :outputs].T.astype(np.float32)
            case "plain" if self._zero_point:
                stored = np.asarray(self._array("weight_zero_point"), np.float32)
                return middle + stored.reshape(-1, stored.shape[1] if stored.ndim == 2 else 1)
        return middle

    @property
    def _scheme(self) -> Any:
        assert self.stored.scheme is not None, self.module
        return self.stored.scheme

    @property
    def _per_word(self) -> int:
        return 32 // self._scheme.bits

    @property
    def _num_groups(self) -> int:
        _, inputs = self.shape
        return math.ceil(inputs / (self._scheme.group or inputs or 1))

    @property
    def _zero_point(self) -> bool:
        return "weight_zero_point" in self.shapes

    @property
    def _g_idx(self) -> str:
        """The name of the tensor with the group of each input; empty if it can't be there."""
        return {"gptq": "g_idx", "gptq_v2": "g_idx", "packed": "weight_g_idx"}.get(self.stored.packing, "")

    @property
    def _input_scale(self) -> str:
        return next((name for name in _INPUT_SCALES if name in self.shapes), _INPUT_SCALES[0])

    @property
    def _scale(self) -> str:
        return next((name for name in _SCALES if name in self.shapes), _SCALES[self.block > 1])

    def _array(self, name: str) -> Array:
        return self.files.array(f"{self.module}.{name}")


def _unpack(words: Array, bits: int) -> Array:
    """Return the unsigned numbers of int32 words `[rows, n]`, the lowest bits first: uint8 `[rows, n * 32 / bits]`."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    out = np.empty((*raw.shape[:-1], raw.shape[-1] * 2), np.uint8)
    np.bitwise_and(raw, 15, out=out[..., ::2])
    np.right_shift(raw, 4, out=out[..., 1::2])
    return out
