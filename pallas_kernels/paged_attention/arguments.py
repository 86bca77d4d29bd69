"""The arguments of an attention call besides tokens and pool: which rows there are, and how they attend.

All are pytrees, whose static parts are known before anything is compiled.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class DecodeRows(NamedTuple):
    """Rows with one query each, of which the first `num_decodes` are computed.

    With `table_rows`, query r has row `table_rows[r]` of the page table, and queries of a sequence follow one another.
    """

    kv_lens: Int[Array, " rows"]
    num_decodes: Int[Array, ""]
    table_rows: Int[Array, " rows"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a step: sequences, their pages and which tokens are theirs.

    Row r has queries `query_starts[r] : query_starts[r + 1]`; its last query has position `kv_lens[r] - 1`, as
    `kv_lens` counts the new tokens. Rows `[0, num_decodes)` have one query each and come first. Rows from `num_seqs` on
    are padding and have no queries. Tokens past `query_starts[num_seqs]` are padding. Page ids are local to the layer:
    page p of layer l is entry `l * pages + p` of the pool.

    `decode_only` promises that every row is a decode, `max_queries` that no row has more queries than this. If it is
    set, as in steps that verify drafts, decode kernels compute all rows, whatever `num_decodes` is.

    With `chunks_only`, the rows before `num_decodes` are left out, however many queries they have: their output is
    unspecified, and their tokens are not written.
    """

    page_table: Int[Array, "rows max_pages"]
    query_starts: Int[Array, " rows_plus_1"]
    kv_lens: Int[Array, " rows"]
    num_decodes: Int[Array, ""]
    num_seqs: Int[Array, ""]
    decode_only: bool = dataclasses.field(default=False, metadata={"static": True})
    max_queries: int | None = dataclasses.field(default=None, metadata={"static": True})
    chunks_only: bool = dataclasses.field(default=False, metadata={"static": True})

    def positions(self, tokens: int) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
        """Return each token's row and position; for padding, anything within the rows."""
        token = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, self.kv_lens.shape[0] - 1)
        return row, self.kv_lens[row] - self.query_starts[row + 1] + token

    def slots(self, tokens: int, page_size: int) -> Int[Array, " tokens"]:
        """Return each token's index among the tokens of a layer's pages of one head; -1 for those not written."""
        row, position = self.positions(tokens)
        slots = self.page_table[row, position // page_size] * page_size + position % page_size
        slots = jnp.where(jnp.arange(tokens, dtype=jnp.int32) < self.query_starts[self.num_seqs], slots, -1)
        return jnp.where(row < self.num_decodes, -1, slots) if self.chunks_only else slots

    def decodes(self, tokens: int) -> DecodeRows:
        """Return the rows that decode kernels compute: decodes, or with `max_queries` each query as its own row."""
        if self.max_queries is None:
            return DecodeRows(self.kv_lens, self.num_decodes)
        row, position = self.positions(tokens)
        live = self.query_starts[self.num_seqs]
        return DecodeRows(jnp.where(jnp.arange(tokens, dtype=jnp.int32) < live, position + 1, 0), live, row)

    @property
    def has_chunks(self) -> bool:
        """Whether prefill kernels compute some rows."""
        return not self.decode_only and self.max_queries is None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How queries attend.

    `scale` multiplies the products of queries and keys. `window` is the number of positions a query sees, including its
    own. `soft_cap` bounds logits by `cap * tanh(x / cap)`. `sinks` adds a logit per head to the softmax's denominator.
    """

    scale: float = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: Float[Array, " heads"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Preparation:
    """The operations on the raw product of the projections before `paged_attention`.

    `bias` is added to it. Queries and keys are scaled to unit mean square (plus `eps`) and multiplied by their weight
    of `norms`. Then each pair (i, i + head_dim / 2) is turned by `rotation`, cosines and sines in float32, and queries
    are multiplied by `query_scale`, float32. With `norm_values`, values are scaled to unit mean square. With
    `keys_as_values`, the product has no values: keys before their norm and rotation are the values.
    """

    eps: float = dataclasses.field(metadata={"static": True})
    bias: Float[Array, " width"] | None = None
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None = None
    rotation: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None = None
    query_scale: Float[Array, " tokens"] | None = None
    norm_values: bool = dataclasses.field(default=False, metadata={"static": True})
    keys_as_values: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPreparation:
    """The operations on the raw products of latent attention before `paged_attention`.

    The value of a row is scaled to unit mean square (plus `eps`) and multiplied by `norm`. The other numbers of a row,
    and as many of each query, are turned by `rotation`, cosines and sines in float32: of n, pair (i, i + n / 2).
    """

    eps: float = dataclasses.field(metadata={"static": True})
    norm: Float[Array, " value_dim"]
    rotation: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]
