"""The public functions: one contract, several backends."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.backends import REFERENCE, Backend, backend_module
from pallas_kernels.paged_attention.layout import PagedKV


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"] | None,
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_decodes: Int[Array, ""],
    num_seqs: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    decode_only: bool = False,
    max_queries: int | None = None,
    backend: Backend = REFERENCE,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Compute causal attention of ragged queries over paged keys and values, and write the new `k` and `v`.

    Row r has queries `query_starts[r] : query_starts[r + 1]`; its last query has position `kv_lens[r] - 1`, as
    `kv_lens` counts the new tokens. Rows `[0, num_decodes)` have one query each and come first. Rows from `num_seqs` on
    are padding and have no queries. Tokens past `query_starts[num_seqs]` are padding: their output is unspecified and
    they are not written. Page ids are local to the layer: page p of layer l is entry `l * pages + p` of the pool.
    Contents of pages that `page_table` names beyond a row's own pages are never used and may be NaN. So may tokens
    before the windows of all queries of a row, though their entries are page ids as well.

    Without `k` and `v`, the pool has the new tokens already and is only read: another layer of this step wrote them.

    `window` is the number of positions a query sees, including its own. `soft_cap` bounds logits by
    `cap * tanh(x / cap)`. `sinks` adds a logit per head to the softmax's denominator. `decode_only` promises that every
    row is a decode, `max_queries` that no row has more queries than this: with few of them, as where drafts are
    verified, decode kernels compute all rows, whatever `num_decodes` is.

    If the pool holds fp8, the layer's `scales` divide what is written and multiply what is read.

    Returns the attention output in `q`'s dtype, accumulated in float32, and the pool with the new tokens in place.
    """
    with jax.named_scope("paged_attention"):
        out, kv = backend_module(backend.name).paged_attention(
            q,
            k,
            v,
            kv,
            layer,
            page_table,
            query_starts,
            kv_lens,
            num_decodes,
            num_seqs,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            decode_only=decode_only,
            max_queries=max_queries,
            target=backend.target,
            interpret=backend.interpret,
        )
    return out, kv


def qkv_attention(
    qkv: Float[Array, "tokens width"],
    bias: Float[Array, " width"] | None,
    norms: tuple[Float[Array, " head_dim"], Float[Array, " head_dim"]] | None,
    rotation: tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]] | None,
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_decodes: Int[Array, ""],
    num_seqs: Int[Array, ""],
    *,
    eps: float,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    query_scale: Float[Array, " tokens"] | None = None,
    norm_values: bool = False,
    keys_as_values: bool = False,
    decode_only: bool = False,
    max_queries: int | None = None,
    backend: Backend,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Compute `paged_attention` of the raw product of the projections; only for backends that take it.

    `qkv` has for each KV head its group of query heads, its key and its value; `bias` is added to it. Queries and keys
    are scaled to unit mean square (plus `eps`) and multiplied by their weight of `norms`. Then each pair
    (i, i + head_dim / 2) is turned by `rotation`, cosines and sines in float32, and queries are multiplied by
    `query_scale`, float32. The result of each of these parts is rounded to the dtype of `qkv`, as is the output. Only
    weights in float32 multiply what isn't rounded yet. With `norm_values`, values are scaled to unit mean square. With
    `keys_as_values`, `qkv` has no values: they are keys before their norm and rotation.
    """
    module: Any = backend_module(backend.name)
    with jax.named_scope("paged_attention"):
        out, kv = module.qkv_attention(
            qkv,
            bias,
            norms,
            rotation,
            kv,
            layer,
            page_table,
            query_starts,
            kv_lens,
            num_decodes,
            num_seqs,
            eps=eps,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            query_scale=query_scale,
            norm_values=norm_values,
            keys_as_values=keys_as_values,
            decode_only=decode_only,
            max_queries=max_queries,
            target=backend.target,
            interpret=backend.interpret,
        )
    return out, kv
