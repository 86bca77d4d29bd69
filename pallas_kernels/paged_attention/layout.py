"""The memory layout of keys and values: one flat pool for all layers of a group; a layer is an offset in pages.

Callers treat `PagedKV` as opaque; only backends use its arrays. The tokens of one head in one page are contiguous, so
that a kernel reads them without a transposition.

On a TPU a page's heads are contiguous, so that one copy brings all heads: copies with a stride of 2 GiB or more are not
possible. Rows of memory have 128 lanes there, and XLA pads or transposes narrower arrays at every use. So rows of a
pool are whole multiples of 128 lanes. For heads of up to 64, one half of a row holds the key and the other the value (a
joined pool, which wastes nothing at 64); wider heads are padded with zeros.

A pool of latent rows (multi-head latent attention, DeepSeek-AI 2024) has one row a token, which all query heads of a
shard share. The row is the key, and its first `value_dim` numbers are the value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

_TPU_LANES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of a group of layers, each `[kv_heads, layers * pages, page_size, lanes]`.

    In a `page_major` pool the first two dimensions are exchanged. A head's numbers are in the first lanes of a row. A
    `joined` pool has keys in the first half of the lanes of `keys` and values in the second half; its `values` have
    no pages. Neither have those of a pool of latent rows, whose values are the first `value_dim` numbers of the keys.
    `scales`, if the pool holds fp8, has the factors of stored keys and values: float32 `[2, layers, kv_heads]`; latent
    rows have that of keys.
    """

    keys: jax.Array
    values: jax.Array
    num_layers: int = dataclasses.field(metadata={"static": True})
    scales: jax.Array | None = None
    joined: bool = dataclasses.field(default=False, metadata={"static": True})
    page_major: bool = dataclasses.field(default=False, metadata={"static": True})
    value_dim: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def num_entries(self) -> int:
        """Pages of all layers."""
        return int(self.keys.shape[0 if self.page_major else 1])

    @property
    def num_kv_heads(self) -> int:
        """KV heads; inside a `shard_map`, those of one shard."""
        return int(self.keys.shape[1 if self.page_major else 0])

    @property
    def num_pages(self) -> int:
        """Pages of one layer; 0 if there is none."""
        return self.num_entries // max(self.num_layers, 1)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.keys.shape[2])

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """The arrays that have pages."""
        return (self.keys, self.values)[: _num_arrays(self)]

    def with_pools(self, pools: Sequence[jax.Array]) -> PagedKV:
        """Return a copy with other arrays in place of `pools`."""
        return dataclasses.replace(self, keys=pools[0], values=(*pools, self.values)[1])

    def gather(
        self, which: int, entries: Int[Array, "*some"], head_dim: int
    ) -> Shaped[Array, "kv_heads *some page_size width"]:
        """Return the keys (0) or values (1) of some entries of the pool, which must exist.

        They are `head_dim` numbers wide; values of latent rows are `value_dim` wide.
        """
        pool = self.pools[which * (_num_arrays(self) - 1)]
        start = which * (pool.shape[3] // 2) if self.joined else 0
        width = head_dim if self.value_dim is None or which == 0 else self.value_dim
        at = (entries,) if self.page_major else (slice(None), entries)
        pages = pool.at[at].get(mode="promise_in_bounds")[..., start : start + width]
        return jnp.moveaxis(pages, entries.ndim, 0) if self.page_major else pages


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Shape, dtype and logical axes of the two arrays of a `PagedKV`, before they exist."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    lanes: int
    dtype: np.dtype
    joined: bool = False
    page_major: bool = False
    value_dim: int | None = None

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes of both arrays."""
        return (None, "kv_heads", None, None) if self.page_major else ("kv_heads", None, None, None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of `keys`, over all shards of one rank."""
        return self._shape(self.num_layers * self.num_pages)

    @property
    def values_shape(self) -> tuple[int, int, int, int]:
        """Shape of `values`, over all shards of one rank."""
        return self._shape(self.num_layers * self.num_pages if _num_arrays(self) > 1 else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool of one rank, keys and values."""
        return (math.prod(self.shape) + math.prod(self.values_shape)) * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers of the group."""
        return _num_arrays(self) * self.num_layers * self.num_kv_heads * self.lanes * self.dtype.itemsize

    def paged_kv(self, keys: Any, values: Any, scales: Any = None) -> PagedKV:
        """Return the pool of these arrays, which may be abstract ones."""
        return PagedKV(keys, values, self.num_layers, scales, self.joined, self.page_major, self.value_dim)

    def _shape(self, entries: int) -> tuple[int, int, int, int]:
        heads, page = self.num_kv_heads, (self.page_size, self.lanes)
        return (entries, heads, *page) if self.page_major else (heads, entries, *page)


def _num_arrays(pool: PagedKV | KVLayout) -> int:
    """Return the number of arrays of a pool that have pages."""
    return 1 if pool.joined or pool.value_dim is not None else 2


def kv_layout(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: np.dtype,
    platform: str = "",
    value_dim: int | None = None,
) -> KVLayout:
    """Return the layout of a group's pool on a platform (jax's name). `num_pages` is per layer and per rank.

    With `value_dim`, it is a pool of latent rows of `head_dim` numbers.
    """
    on_tpu = platform == "tpu"
    lanes = head_dim + (-head_dim % _TPU_LANES if on_tpu else 0)
    joined = on_tpu and 2 * head_dim <= _TPU_LANES and value_dim is None
    sizes = num_layers, num_pages, page_size, num_kv_heads, lanes
    return KVLayout(*sizes, jnp.dtype(dtype), joined, on_tpu, value_dim)


def as_pool_rows(
    k: Shaped[Array, "... head_dim"], v: Shaped[Array, "... head_dim"] | None, kv: PagedKV
) -> tuple[Shaped[Array, "... lanes"], ...]:
    """Return keys and values as rows of the pool, one array for each array of the pool. Latent rows are all in `k`."""
    lanes, head_dim = kv.keys.shape[3], k.shape[-1]
    width = lanes // 2 if kv.joined else lanes
    given = (k,) if v is None else (k, v)
    rows = tuple(
        jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - head_dim),)) if width > head_dim else x for x in given
    )
    return (jnp.concatenate(rows, axis=-1),) if kv.joined else rows
