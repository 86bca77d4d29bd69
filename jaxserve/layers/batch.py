"""The tokens of one step, as the input of a model."""

from __future__ import annotations

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.gated_delta import DeltaRows, DeltaStates
from pallas_kernels.packed_attention import Texts
from pallas_kernels.paged_attention import PagedKV, Rows

KVPools = tuple[PagedKV | DeltaStates, ...]
"""The keys and values of a rank, by KV group, then the states of layers that keep states."""


@flax.struct.dataclass
class TokenBatch:
    """Ragged rows of tokens over paged KV; `pallas_kernels.paged_attention` describes how the fields work together.

    `page_tables` are by KV group. `fill_lens` counts the tokens of a token's sequence that were known when it started,
    even if later steps compute them. Three static fields are promises: `decode_only` that every row has one token,
    `max_queries` that no row has more than this, `starts_last` that rows that begin their sequence follow all others.
    Padding tokens come last, at position 0. `states` says where the states of the rows are, if layers keep states.

    In a bidirectional model, rows are whole texts, and there are no pages. `token_types` is 1 for the tokens of the
    second text of a pair.
    """

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    fill_lens: Int[Array, " tokens"]
    page_tables: tuple[Int[Array, "rows max_pages"], ...]
    query_starts: Int[Array, " rows_plus_1"]
    kv_lens: Int[Array, " rows"]
    num_decodes: Int[Array, ""]
    num_seqs: Int[Array, ""]
    states: DeltaRows | None = None
    token_types: Int[Array, " tokens"] | None = None
    decode_only: bool = flax.struct.field(pytree_node=False, default=False)
    max_queries: int | None = flax.struct.field(pytree_node=False, default=None)
    starts_last: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, padding included."""
        return int(self.tokens.shape[0])

    @property
    def live(self) -> Bool[Array, " tokens"]:
        """Which tokens belong to a sequence; the others are padding."""
        return jnp.arange(self.num_tokens, dtype=jnp.int32) < self.query_starts[self.num_seqs]

    @property
    def num_continued(self) -> Int[Array, ""]:
        """The number of rows that have tokens of earlier steps."""
        return (self.kv_lens > jnp.diff(self.query_starts)).sum(dtype=jnp.int32)

    @property
    def texts(self) -> Texts:
        """The rows as whole texts, in a bidirectional model."""
        return Texts(self.query_starts, self.num_seqs)

    def rows(self, group: int) -> Rows:
        """Return the rows, with the page table of a KV group."""
        where = self.page_tables[group], self.query_starts, self.kv_lens, self.num_decodes, self.num_seqs
        return Rows(*where, decode_only=self.decode_only, max_queries=self.max_queries)


@flax.struct.dataclass
class LayerOutput:
    """The result of one layer, or of several that follow each other: hidden states and the updated cache.

    `expert_tokens` tells how many tokens each of this shard's experts computed, for each mixture of several layers.
    `features` are the inputs of the layers in `LaidOutModel.taps`.
    """

    hidden: Float[Array, "tokens dim"]
    kv: KVPools
    expert_tokens: Int32[Array, "*mixtures experts"] | None = None
    features: tuple[Float[Array, "tokens dim"], ...] = ()


@flax.struct.dataclass
class KVLayer:
    """The place of a layer's keys and values, or of its states: layer `index` of group `group`.

    A layer that `reuses` the keys and values of an earlier one has none of its own.
    """

    index: Int[Array, ""]
    group: int = flax.struct.field(pytree_node=False)
    reuses: bool = flax.struct.field(pytree_node=False, default=False)


def paged_pool(kv: KVPools, group: int) -> PagedKV:
    """Return the keys and values of a KV group."""
    pool = kv[group]
    assert isinstance(pool, PagedKV)
    return pool


def replace_pool(kv: KVPools, group: int, pool: PagedKV | DeltaStates) -> KVPools:
    """Return the pools with another one for `group`."""
    return (*kv[:group], pool, *kv[group + 1 :])
