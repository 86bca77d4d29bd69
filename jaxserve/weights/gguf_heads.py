"""The order in which llama.cpp's converter writes the value heads of gated delta nets.

Hugging Face has the value heads of a key head side by side. The converter of Qwen3.5 puts the first value heads of all
key heads first, then their second ones. That of Qwen3-Next leaves them, and leaves one tensor for beta and the decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxserve.model_source.gguf_config import delta_sizes
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.model_source.gguf_row import Architecture

GATES, GATE = ".in_proj_ba.", (".in_proj_b.", ".in_proj_a.")
"""Parts of the names of the tensor of both gates, and of those of beta and of the decay."""

_OUTPUT = ".out_proj."


@dataclasses.dataclass(frozen=True)
class ValueHeads:
    """The heads of a file's delta nets, and whether those of values are `tiled`, as in files of Qwen3.5."""

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    tiled: bool

    def rows(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the file's row for each row of a tensor, by Hugging Face's name; None if the order is the same."""
        if ".linear_attn." not in name or _OUTPUT in name or name.endswith(".norm.weight"):
            return None
        if not self.tiled:
            gate = next((i for i, part in enumerate(GATE) if part in name), None)
            both = np.arange(self.key_heads * 2 * self.group).reshape(self.key_heads, 2, self.group)
            return None if gate is None else both[:, gate].reshape(-1)
        if ".in_proj_z." in name:
            return self._untiled(self.value_dim)
        if ".in_proj_qkv." in name or ".conv1d." in name:
            others = 2 * self.key_heads * self.key_dim
            return np.concatenate([np.arange(others), others + self._untiled(self.value_dim)])
        return self._untiled(1)

    def columns(self, name: str, window: slice, unit: int) -> Iterator[tuple[slice, slice]]:
        """Yield windows that together are a `window` of a tensor's columns, each inside it and in the file.

        `unit` columns count as one.
        """
        if ".linear_attn." not in name or _OUTPUT not in name or not self.tiled:
            yield slice(0, window.stop - window.start), window
            return
        size = self.value_dim // unit
        stored = self._untiled(1)
        for head in range(window.start // size, -(-window.stop // size)):
            begin, end = max(window.start, head * size), min(window.stop, (head + 1) * size)
            moved = (int(stored[head]) - head) * size
            yield slice(begin - window.start, end - window.start), slice(begin + moved, end + moved)

    def _untiled(self, size: int) -> np.ndarray[Any, Any]:
        """Return the file's entry for each entry of value heads that have `size` of them."""
        tiled = np.arange(self.key_heads * self.group * size).reshape(self.group, self.key_heads, size)
        return tiled.swapaxes(0, 1).reshape(-1)


def value_heads(metadata: GGUFMetadata, row: Architecture) -> ValueHeads | None:
    """Return the heads of a file's delta nets, None if it has none."""
    if not row.value_heads:
        return None
    key_heads, heads, key_dim, value_dim = delta_sizes(metadata)
    return ValueHeads(key_heads, heads // key_heads, key_dim, value_dim, row.value_heads == "tiled")
