"""A GGUF file as a `QuantizedSource`: blocks are dequantized as they are read, or kept quantized.

Undoes what llama.cpp's converter changed: the tensor names, and in some architectures (`gguf_architectures`) the row
order of q and k, the weights of norms, and which tensors the experts of a layer share. `model_source` parses the
header; `gguf_blocks` and the `gguf` package do the arithmetic of the quantized types.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from jaxserve.model_source.fields import EXPERTS
from jaxserve.model_source.gguf_config import ROPE_TENSORS, architecture_of, head_counts, layer_counts
from jaxserve.model_source.gguf_metadata import GGUFMetadata, GGUFTensorInfo
from jaxserve.model_source.gguf_row import Architecture
from jaxserve.params import Window
from jaxserve.quant import GGUF_TYPES, Stored, StoredWeight
from jaxserve.weights.finite import check_finite
from jaxserve.weights.gguf_blocks import BLOCK_KINDS
from jaxserve.weights.gguf_heads import GATE, GATES, value_heads
from jaxserve.weights.scales import check_weight_scales
from jaxserve.weights.source import TensorInfo, row_blocks

_FP4_MAGNITUDE = 7
_READABLE = ("F32", "F16", "BF16", *GGUF_TYPES)
_TYPES = {kind.value: kind for kind in Kind}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Files of the first mixtures have a tensor for each expert, with its number after the part's name
_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>(?:nextn\.)?\w+?)(?:\.(?P<expert>\d+))?(?:\.(?P<kind>weight|bias))?"
)


class GGUFFile:
    """The tensors of a GGUF file, or of all that a model is split into. Raises `ConfigError` if one isn't complete."""

    def __init__(self, path: Path) -> None:
        metadata = GGUFMetadata(path)
        self._path = path
        self._data = {file: np.memmap(file, np.uint8, mode="r") for file in metadata.files}
        row = architecture_of(metadata)
        names = {**_LAYER_NAMES, **row.names}
        self._heads = value_heads(metadata, row)
        drafting = "" if self._heads is None else f"model.layers.{layer_counts(metadata)[0]}."
        found: dict[str, list[GGUFTensorInfo]] = defaultdict(list)
        for tensor in metadata.tensors.values():
            if tensor.name not in ROPE_TENSORS:
                for name, part in _hf_tensors(tensor, row, names):
                    found[_of_drafts(name, drafting)].append(part)
        self._tensors = {name: sorted(parts, key=lambda part: part.name) for name, parts in found.items()}
        self._infos = {name: _info(parts) for name, parts in self._tensors.items()}
        for name in [name for name in self._infos if GATES in name]:
            info, parts = self._infos.pop(name), self._tensors.pop(name)
            for gate in GATE:
                self._infos[name.replace(GATES, gate)] = dataclasses.replace(
                    info, shape=(info.shape[0] // 2, *info.shape[1:])
                )
                self._tensors[name.replace(GATES, gate)] = parts
        self._halves = _halves(self._infos)
        for name, (keys, values) in self._halves.items():
            self._infos[name] = _joined(self._infos.pop(keys), self._infos.pop(values))
        self._permuted = dict(zip((".q_proj.", ".k_proj."), head_counts(metadata))) if row.pairs_adjacent else {}
        self._norm_offset = row.norm_offset

    @property
    def description(self) -> str:
        return str(self._path)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `TensorSource`."""
        if name in self._halves:
            self._read_halves(name, window, out)
            return
        for kind, raw, inside, part in self._parts(name, window, out):
            if kind == Kind.MXFP4:  # Scales of other types are products of float16
                self._factors(name, kind, raw)
            # All rows become one long row: the package works through groups of 16 rows, which is slow for short ones
            values = dequantize(raw.reshape(1, -1), kind).reshape(len(part), -1)
            part[...] = values[:, inside].reshape(part.shape)
        if self._norm_offset and _is_norm(name):
            out -= np.asarray(self._norm_offset, out.dtype)
        if name.endswith(".A_log"):  # The file has what decays are multiplied by
            out[...] = np.log(-out)

    def _read_halves(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """Read a window of `kv_b_proj`: for each head, the rows that make its keys, then those that make its values."""
        rows, columns = window
        keys, values = self._halves[name]
        plain, size = self._tensors[keys][0].shape[2], self._tensors[values][0].shape[1]
        for head in range(rows.start // (plain + size), -(-rows.stop // (plain + size))):
            start, one = head * (plain + size), slice(head, head + 1)
            for half, first, count in ((keys, start, plain), (values, start + plain, size)):
                begin, end = max(rows.start, first), min(rows.stop, first + count)
                if begin >= end:
                    continue
                part, inside = out[None, begin - rows.start : end - rows.start], slice(begin - first, end - first)
                if half == values:
                    self.read(half, (one, inside, columns), part)
                else:
                    across = np.empty((1, columns.stop - columns.start, end - begin), out.dtype)
                    self.read(half, (one, columns, inside), across)
                    part[...] = across.swapaxes(1, 2)

    @functools.cached_property
    def stored(self) -> Stored:
        """See `QuantizedSource`."""
        kinds = ((name, info.stored_type) for name, info in self._infos.items())
        return {name: GGUF_TYPES.get(kind, StoredWeight(kind)) for name, kind in kinds}

    def read_numbers(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `QuantizedSource`."""
        for kind, raw, inside, part in self._parts(name, window, out):
            part[...] = BLOCK_KINDS[kind].numbers(_blocks(raw, kind)).reshape(len(part), -1)[:, inside]

    def read_factors(self, name: str, window: Window, unit: int, out: np.ndarray[Any, Any]) -> None:
        """See `QuantizedSource`."""
        for kind, raw, inside, part in self._parts(name, window, out, unit):
            found = np.arange(inside.start, inside.stop, unit) // BLOCK_KINDS[kind].group
            for factor, values in zip(("scale", "minimum"), self._factors(name, kind, raw), strict=True):
                part[factor] = values.reshape(len(part), -1)[:, found]

    def _factors(self, name: str, kind: Kind, raw: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the scales and minima of blocks. Raises `ConfigError` for values that can't be used."""
        blocks = _blocks(raw, kind)
        factors = BLOCK_KINDS[kind].factors(blocks)
        for values in factors:
            check_finite(values, name, self.description)

        def are_used(chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return (BLOCK_KINDS[kind].numbers(blocks)[chosen[..., 0]] & _FP4_MAGNITUDE).any(axis=-1)

        # A scale in float16 may be 0 though its numbers aren't: tiny scales are rounded to 0
        check_weight_scales(factors[0], name, self.description, are_used if kind == Kind.MXFP4 else None)
        return factors

    def read_order(self, name: str) -> None:
        """See `QuantizedSource`."""
        return

    def read_input_scale(self, name: str) -> float:
        """See `QuantizedSource`."""
        raise AssertionError(f"{name}: GGUF has no quantized activations")

    def _parts(
        self, name: str, window: Window, out: np.ndarray[Any, Any], unit: int = 1
    ) -> Iterator[tuple[Kind, np.ndarray[Any, Any], slice, np.ndarray[Any, Any]]]:
        """Split a window as `_row_parts` does, and its columns where the file has them in another order.

        In its last dimension and in that of `out`, `unit` elements count as one.
        """
        if len(window) < 2:
            yield from self._row_parts(name, window, out)
            return
        *rows, columns = window
        pieces = [(slice(None), columns)] if self._heads is None else self._heads.columns(name, columns, unit)
        for inside, stored in pieces:
            elements = slice(stored.start * unit, stored.stop * unit)
            yield from self._row_parts(name, (*rows, elements), out[..., inside])

    def _row_parts(
        self, name: str, window: Window, out: np.ndarray[Any, Any]
    ) -> Iterator[tuple[Kind, np.ndarray[Any, Any], slice, np.ndarray[Any, Any]]]:
        """Split a window into blocks of rows.

        Yields for each: the type of the file's tensor, the bytes that it touches, the slice of their elements that
        belongs to the window, and the part of `out` that it fills.
        """
        for tensor, inner, target in self._matrices(name, window, out):
            kind = _TYPES[tensor.ggml_type]
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            rows, row_bytes = tensor.shape[0], _num_bytes(kind, tensor.shape[1:])
            stored = self._data[tensor.path][tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)
            order = self._row_order(name, rows)
            first, last, inside = _touched_columns(tensor.shape, inner, block_elements)
            touched = slice(first // block_elements * block_bytes, last // block_elements * block_bytes)
            for (rows_read, *_), part in row_blocks(inner, target):
                yield kind, stored[rows_read if order is None else order[rows_read], touched], inside, part

    def _matrices(
        self, name: str, window: Window, out: np.ndarray[Any, Any]
    ) -> Iterator[tuple[GGUFTensorInfo, Window, np.ndarray[Any, Any]]]:
        """Split a window by the file's matrices or vectors; yields each with its window and its part of `out`."""
        tensors = self._tensors[name]
        count = len(tensors)
        if count == 1 and len(window) <= 2:
            yield tensors[0], window, out
            return
        experts, rows, *columns = window
        for expert, target in zip(range(experts.start, experts.stop), out, strict=True):
            for i, tensor in enumerate(tensors):
                first, last = (-(-(at - i) // count) for at in (rows.start, rows.stop))
                inner = slice(first, last), *columns
                yield _of_expert(tensor, expert), inner, target[first * count + i - rows.start :: count]

    def _row_order(self, name: str, rows: int) -> np.ndarray[Any, Any] | None:
        """Return the file's row for each of Hugging Face's rows, or None if the order is the same.

        In Hugging Face's order, the two dimensions that a rotation turns are half a head apart; the file has them side
        by side.
        """
        if self._heads is not None:
            return self._heads.rows(name)
        heads = next((count for part, count in self._permuted.items() if part in name), 0)
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows) if heads else None


def _hf_tensors(
    tensor: GGUFTensorInfo, row: Architecture, names: Mapping[str, str]
) -> Iterator[tuple[str, GGUFTensorInfo]]:
    """Yield Hugging Face's name of a tensor, or of its part of each expert.

    An unknown one keeps its own name and is later reported as left over.
    """
    name = _hf_name(tensor.name, row, names)
    if "*" not in name:
        yield name, tensor
        return
    for expert in range(min(tensor.shape[0], int(EXPERTS.most)) if tensor.shape else 0):
        yield name.replace("*", str(expert)), _of_expert(tensor, expert)


def _hf_name(name: str, row: Architecture, names: Mapping[str, str]) -> str:
    """Return Hugging Face's name of a tensor, with a `*` if it holds all experts."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, expert, kind = match["layer"], match["part"], match["expert"], match["kind"]
    if layer is None:
        return f"{row.top_names[part]}.{kind}" if part in row.top_names and kind and expert is None else name
    part = part if expert is None else f"{part}_exps"
    found = names.get(f"{part}.{kind or ''}") or (f"{names[part]}.{kind}" if kind and part in names else None)
    if found is None or (expert is not None and "*" not in found):
        return name
    return f"{row.layers}.{layer}.{found if expert is None else found.replace('*', expert)}"


def _of_drafts(name: str, drafting: str) -> str:
    """Return the name of a tensor as Qwen's checkpoints have it; `drafting` precedes those of the layer that drafts."""
    own = name.removeprefix(drafting)
    return name if own == name else own if own.startswith("mtp.") else f"mtp.layers.0.{own}"


def _is_norm(name: str) -> bool:
    """Return whether the converter changed the weight of a norm: that inside a delta net stays as it is."""
    return "norm" in name.split(".")[-2] and ".linear_attn." not in name


def _of_expert(tensor: GGUFTensorInfo, expert: int) -> GGUFTensorInfo:
    """Return one of the matrices or vectors that a tensor has for each expert."""
    shape = tensor.shape[1:]
    size = _num_bytes(_TYPES.get(tensor.ggml_type), shape)
    return dataclasses.replace(tensor, shape=shape, offset=tensor.offset + expert * size)


def _num_bytes(kind: Kind | None, shape: tuple[int, ...]) -> int:
    if kind is None:
        return 0
    elements, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // elements * size


def _blocks(raw: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Return rows of bytes as blocks, `[rows, count, block_bytes]`."""
    return raw.reshape(len(raw), -1, GGML_QUANT_SIZES[kind][1])


def _info(tensors: Sequence[GGUFTensorInfo]) -> TensorInfo:
    """Return the shape and type of the tensor whose rows alternate between these tensors of the file."""
    kinds = [_TYPES.get(tensor.ggml_type) for tensor in tensors]
    types = [f"ggml type {tensor.ggml_type}" if kind is None else kind.name for tensor, kind in zip(tensors, kinds)]
    shape, stored_type = tensors[0].shape, " and ".join(dict.fromkeys(types))
    for kind, name in zip(kinds, types):
        if kind is None or name not in _READABLE:
            return TensorInfo(shape, stored_type, f"type {name} is not supported, only {', '.join(_READABLE)} are")
        block = GGML_QUANT_SIZES[kind][0]
        if (shape[-1] if len(shape) > 1 else 1) % block:
            return TensorInfo(shape, stored_type, f"its rows are no multiple of {name}'s {block} elements")
    if not 1 <= len(shape) <= 3:
        return TensorInfo(shape, stored_type, f"it has {len(shape)} dimensions, only up to three are read")
    if len(tensors) > 1:
        if len(shape) < 2 or len({tensor.shape for tensor in tensors}) > 1:
            found = " and ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
            return TensorInfo(shape, stored_type, f"{found} have no rows that could alternate")
        shape = shape[0], shape[1] * len(tensors), *shape[2:]
    return TensorInfo(shape, stored_type, quantized=len(shape) == 3)


def _halves(infos: Mapping[str, TensorInfo]) -> dict[str, tuple[str, str]]:
    """Return the names of the tensors that the converter made of each `kv_b_proj`, `[heads, rank, qk_nope_head_dim]`
    and `[heads, v_head_dim, rank]`."""
    found = {}
    for keys, info in infos.items():
        values = keys.replace(".k_b_proj.", ".v_b_proj.")
        if values == keys or values not in infos:
            continue
        shapes = info.shape, infos[values].shape
        if {len(shape) for shape in shapes} == {3} and shapes[0][:2] == shapes[1][::2]:
            found[keys.replace(".k_b_proj.", ".kv_b_proj.")] = keys, values
    return found


def _joined(keys: TensorInfo, values: TensorInfo) -> TensorInfo:
    """Return the shape and type of a `kv_b_proj` of two tensors."""
    heads, rank, plain = keys.shape
    types = dict.fromkeys((keys.stored_type, values.stored_type))
    return TensorInfo(
        (heads * (plain + values.shape[1]), rank), " and ".join(types), keys.unreadable or values.unreadable
    )


def _touched_columns(shape: tuple[int, ...], window: Window, block: int) -> tuple[int, int, slice]:
    """Return the bounds of the whole blocks of a row that a window touches, and the window's slice within them."""
    if len(shape) == 1:
        return 0, 1, slice(0, 1)
    start, stop = window[1].start, window[1].stop
    first, last = start // block * block, -(-stop // block) * block
    return first, last, slice(start - first, stop - first)
