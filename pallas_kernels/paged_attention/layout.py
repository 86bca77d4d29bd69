"""How keys and values lie in memory: one flat pool for all layers of a group, a layer being an offset of pages.

Callers treat `PagedKV` as opaque; only backends look inside. Head-major, so that the tokens of one head in one page
are one contiguous run and a kernel reads them without a transposition.

On a TPU rows of memory are 128 lanes wide, and narrower arrays are padded or turned around at every use. There a pool
is as wide as whole rows: a head of up to 64 has its key in one half of a row and its value in the other (a joined
pool, of which nothing is wasted at 64), a wider one is padded with zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

_TPU_LANES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of a group of layers, each `[kv_heads, layers * pages, page_size, lanes]`.

    A head's numbers are the first of its lanes. A joined pool has keys in the first half of the lanes of `keys` and
    values in the second half; its `values` are empty, `[kv_heads, 0, page_size, lanes]`.
    `scales`, where the pool holds fp8, is float32 `[2, layers, kv_heads]`: the factors of stored keys and values.
    """

    keys: jax.Array
    values: jax.Array
    num_layers: int = dataclasses.field(metadata={"static": True})
    scales: jax.Array | None = None
    joined: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return int(self.keys.shape[1]) // self.num_layers

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return int(self.keys.shape[2])

    @property
    def pools(self) -> tuple[jax.Array, ...]:
        """The arrays that hold something."""
        return (self.keys,) if self.joined else (self.keys, self.values)

    def with_pools(self, pools: Sequence[jax.Array]) -> PagedKV:
        """The same with other arrays in the place of `pools`."""
        return dataclasses.replace(self, keys=pools[0], values=self.values if self.joined else pools[1])

    def pool_and_lanes(self, which: int, head_dim: int) -> tuple[jax.Array, slice]:
        """Where keys (0) or values (1) lie: in which array, and in which of its lanes."""
        if not self.joined:
            return (self.keys, self.values)[which], slice(0, head_dim)
        start = which * (self.keys.shape[3] // 2)
        return self.keys, slice(start, start + head_dim)


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
    axes: tuple[str | None, ...] = ("kv_heads", None, None, None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of `keys`, over all shards of one rank."""
        return (self.num_kv_heads, self.num_layers * self.num_pages, self.page_size, self.lanes)

    @property
    def values_shape(self) -> tuple[int, int, int, int]:
        """Shape of `values`, likewise."""
        heads, entries, tokens, lanes = self.shape
        return (heads, 0 if self.joined else entries, tokens, lanes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool of one rank, keys and values."""
        return (math.prod(self.shape) + math.prod(self.values_shape)) * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers of the group."""
        arrays = 1 if self.joined else 2
        return arrays * self.num_layers * self.num_kv_heads * self.lanes * self.dtype.itemsize


def kv_layout(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: np.dtype,
    platform: str = "",
) -> KVLayout:
    """The layout of a group's pool on a platform, as jax calls it. `num_pages` is per layer and per rank."""
    lanes, joined = head_dim, False
    if platform == "tpu":
        joined = 2 * head_dim <= _TPU_LANES
        lanes += -head_dim % _TPU_LANES
    return KVLayout(num_layers, num_pages, page_size, num_kv_heads, lanes, jnp.dtype(dtype), joined)


def in_lanes(
    k: Shaped[Array, "... head_dim"], v: Shaped[Array, "... head_dim"], kv: PagedKV
) -> tuple[Shaped[Array, "... lanes"], ...]:
    """Keys and values as rows of the pool: one array for each that the pool has."""
    lanes, head_dim = kv.keys.shape[3], k.shape[-1]
    room = lanes // 2 if kv.joined else lanes
    k, v = (jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, room - head_dim),)) if room > head_dim else x for x in (k, v))
    return (jnp.concatenate([k, v], axis=-1),) if kv.joined else (k, v)
