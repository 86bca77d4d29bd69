"""Writes small GGUF files with the gguf package: real files without a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, VOCAB = 2, 32, 4, 16


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    values: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write a file with the keys that every model has, and `values` in addition or in their place."""
    keys: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": 64,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
    }
    keys = {f"{architecture}.{name}": value for name, value in keys.items()} | (values or {})
    arrays = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)} | (tensors or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if key not in without:
            _add(writer, key, value)
    for name, array in arrays.items():
        if name not in without:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif type(value) is int and not 0 <= value < 2**32:
        (writer.add_int64 if value < 0 else writer.add_uint64)(key, value)
    elif isinstance(value, float) and 1e38 < abs(value) < float("inf"):
        writer.add_float64(key, value)
    else:
        add[type(value)](key, value)
