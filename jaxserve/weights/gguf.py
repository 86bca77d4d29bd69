"""A GGUF file as a `BlockSource`: blocks are dequantized as they are read, or kept quantized.

Undoes what llama.cpp's converter changed: the tensor names, and in some architectures (`gguf_architectures`) the row
order of q and k and the weights of norms. `model_source` parses the header; `gguf_blocks` and the `gguf` package do the
arithmetic of the quantized types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxserve.model_source.gguf_config import ROPE_TENSORS, architecture_of, head_counts
from jaxserve.model_source.gguf_metadata import GGUFMetadata, GGUFTensorInfo
from jaxserve.params import Window
from jaxserve.quant import GGUF_TYPES, Stored, StoredWeight
from jaxserve.weights.finite import check_finite
from jaxserve.weights.gguf_blocks import BLOCK_KINDS
from jaxserve.weights.source import TensorInfo, row_blocks

_READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_TYPES = {kind.value: kind for kind in GGMLQuantizationType}

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


class GGUFFile:
    """The tensors of one GGUF file. Raises `ConfigError` if the file isn't a complete GGUF file."""

    def __init__(self, path: Path) -> None:
        metadata = GGUFMetadata(path)
        self._path = path
        self._data = np.memmap(path, np.uint8, mode="r")
        row = architecture_of(metadata)
        names = {**_LAYER_NAMES, **row.names}
        weights = {name: info for name, info in metadata.tensors.items() if name not in ROPE_TENSORS}
        self._tensors = {_hf_name(name, names): info for name, info in weights.items()}
        self._infos = {name: _info(tensor) for name, tensor in self._tensors.items()}
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
        kind = _TYPES[self._tensors[name].ggml_type]
        for raw, inside, part in self._row_parts(name, window, out):
            # As one long row: the package works through groups of 16 rows, which is slow for short ones
            values = dequantize(raw.reshape(1, -1), kind).reshape(len(part), -1)
            part[...] = values[:, inside].reshape(part.shape)
        if self._norm_offset and name.endswith("norm.weight"):
            out -= np.asarray(self._norm_offset, out.dtype)

    @property
    def stored(self) -> Stored:
        """See `QuantizedSource`."""
        kinds = ((name, info.stored_type) for name, info in self._infos.items())
        return {name: GGUF_TYPES.get(kind, StoredWeight(kind)) for name, kind in kinds}

    def read_numbers(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        """See `QuantizedSource`."""
        decode = BLOCK_KINDS[_TYPES[self._tensors[name].ggml_type]].numbers
        for raw, inside, part in self._row_parts(name, window, out):
            part[...] = decode(self._blocks(name, raw)).reshape(len(part), -1)[:, inside]

    def read_factors(self, name: str, window: Window, unit: int, out: np.ndarray[Any, Any]) -> None:
        """See `QuantizedSource`."""
        group, _, decode = BLOCK_KINDS[_TYPES[self._tensors[name].ggml_type]]
        rows, units = window
        inputs = slice(units.start * unit, units.stop * unit)
        for raw, inside, part in self._row_parts(name, (rows, inputs), out):
            found = np.arange(inside.start, inside.stop, unit) // group
            for factor, values in zip(("scale", "minimum"), decode(self._blocks(name, raw)), strict=True):
                check_finite(values, name, self.description)
                part[factor] = values.reshape(len(part), -1)[:, found]

    def read_order(self, name: str) -> None:
        """See `QuantizedSource`."""
        return

    def read_input_scale(self, name: str) -> float:
        """See `QuantizedSource`."""
        raise AssertionError(f"{name}: GGUF has no quantized activations")

    def _blocks(self, name: str, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return rows of bytes as blocks, `[rows, count, block_bytes]`."""
        return raw.reshape(len(raw), -1, GGML_QUANT_SIZES[_TYPES[self._tensors[name].ggml_type]][1])

    def _row_parts(
        self, name: str, window: Window, out: np.ndarray[Any, Any]
    ) -> Iterator[tuple[np.ndarray[Any, Any], slice, np.ndarray[Any, Any]]]:
        """Split a window into blocks of rows.

        Yields for each: the bytes that it touches, the slice of their elements that belongs to the window, and the part
        of `out` that it fills.
        """
        tensor = self._tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[_TYPES[tensor.ggml_type]]
        rows, row_elements = tensor.shape[0], math.prod(tensor.shape[1:])
        row_bytes = row_elements // block_elements * block_bytes
        stored = self._data[tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)
        order = self._row_order(name, rows)
        first, last, inside = _touched_columns(tensor.shape, window, block_elements)
        touched = slice(first // block_elements * block_bytes, last // block_elements * block_bytes)
        for (rows_read, *_), part in row_blocks(window, out):
            yield stored[rows_read if order is None else order[rows_read], touched], inside, part

    def _row_order(self, name: str, rows: int) -> np.ndarray[Any, Any] | None:
        """Return the file's row for each of Hugging Face's rows, or None if the order is the same.

        Hugging Face has the two dimensions that a rotation turns half a head apart, the file side by side.
        """
        heads = next((count for part, count in self._permuted.items() if part in name), 0)
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows) if heads else None


def _hf_name(name: str, names: Mapping[str, str]) -> str:
    """Return a tensor's Hugging Face name; an unknown one keeps its own name and is later reported as left over."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_TOP_NAMES[part]}.{kind}" if part in _TOP_NAMES else name
    return f"model.layers.{layer}.{names[part]}.{kind}" if part in names else name


def _info(tensor: GGUFTensorInfo) -> TensorInfo:
    kind = _TYPES.get(tensor.ggml_type)
    name = f"ggml type {tensor.ggml_type}" if kind is None else kind.name
    if kind is None or name not in _READABLE:
        return TensorInfo(tensor.shape, name, f"type {name} is not supported, only {', '.join(_READABLE)} are")
    if not 1 <= len(tensor.shape) <= 2:
        return TensorInfo(
            tensor.shape, name, f"it has {len(tensor.shape)} dimensions, only vectors and matrices are read"
        )
    block = GGML_QUANT_SIZES[kind][0]
    broken = math.prod(tensor.shape[1:]) % block != 0
    return TensorInfo(tensor.shape, name, f"its rows are no multiple of {name}'s {block} elements" if broken else "")


def _touched_columns(shape: tuple[int, ...], window: Window, block: int) -> tuple[int, int, slice]:
    """Return the bounds of the whole blocks of a row that a window touches, and the window's slice within them."""
    if len(shape) == 1:
        return 0, 1, slice(0, 1)
    start, stop = window[1].start, window[1].stop
    first, last = start // block * block, -(-stop // block) * block
    return first, last, slice(start - first, stop - first)
