"""How keys and values lie in memory: one flat pool for all layers of a group, a layer being an offset of pages.

Callers treat `PagedKV` as opaque; only backends look inside. Head-major, so that the tokens of one head in one page
are one contiguous run and a kernel reads them without a transposition.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of a group of layers, each `[kv_heads, layers * pages, page_size, head_dim]`.

    `scales`, where the pool holds fp8, is float32 `[2, layers, kv_heads]`: the factors of stored keys and values.
    """

    keys: jax.Array
    values: jax.Array
    num_layers: int = dataclasses.field(metadata={"static": True})
    scales: jax.Array | None = None

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return int(self.keys.shape[1]) // self.num_layers

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return int(self.keys.shape[2])


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Shape, dtype and logical axes of the two arrays of a `PagedKV`, before they exist."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype
    axes: tuple[str | None, ...] = ("kv_heads", None, None, None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of `keys` and of `values`, over all shards of one rank."""
        return (self.num_kv_heads, self.num_layers * self.num_pages, self.page_size, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool of one rank, keys and values."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers of the group."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def kv_layout(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: np.dtype
) -> KVLayout:
    """The layout of a group's pool. `num_pages` is per layer and per rank."""
    return KVLayout(num_layers, num_pages, page_size, num_kv_heads, head_dim, jnp.dtype(dtype))
