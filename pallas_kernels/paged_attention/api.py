"""The public function: one contract, several backends."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.backends import REFERENCE, Backend, backend_module
from pallas_kernels.paged_attention.layout import PagedKV


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
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
    backend: Backend = REFERENCE,
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Causal attention of ragged queries over paged keys and values; writes the new `k` and `v` on the way.

    Row r has queries `query_starts[r] : query_starts[r + 1]`, the last of which stands at position `kv_lens[r] - 1`;
    `kv_lens` counts the new tokens. Rows `[0, num_decodes)` have one query each and come first, rows from `num_seqs`
    on are padding and have none; tokens past `query_starts[num_seqs]` are padding, their output is unspecified and
    they are not written. Page ids are local to the layer: page p of layer l is entry `l * pages + p` of the pool.
    Entries of `page_table` beyond a row's pages are never read through: what they point to may hold NaN. So may what
    lies before the windows of all queries of a row, though those entries are ids of pages too.

    `window` counts the positions a query sees, itself included. `soft_cap` bounds logits by `cap * tanh(x / cap)`.
    `sinks` adds a logit per head to the softmax's denominator. `decode_only` is a promise that every row is a decode.

    Where the pool holds fp8, its `scales` of the layer divide what is written and multiply what is read.

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
            target=backend.target,
            interpret=backend.interpret,
        )
    return out, kv
