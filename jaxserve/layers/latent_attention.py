"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): all heads read one row a token from the paged cache.

The row has a latent vector, of which each head makes a key and a value, and the part of the key that is rotated. There
are two forms of the same mathematics:

- Absorbed: attention compares queries with the rows themselves. Before it, each query is multiplied by the weights that
  make keys; after it, each sum of latent vectors by the weights that make values. Keys and values of heads never exist.
- Expanded: the keys and values of all heads are made from the rows of the step's tokens, and attention reads these. A
  pair of a query and a key takes 320 products in DeepSeek-V3, instead of 1,088. It serves prompts that begin in the
  step: the tokens of earlier steps would have to be expanded again.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch, paged_pool, replace_pool
from jaxserve.layers.linear import linear, linear_by_head, row_parallel
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import Rotation, rotate
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Backend,
    LatentPreparation,
    PagedKV,
    Problem,
    Rows,
    as_stored,
    kv_layout,
    kv_platform,
    paged_attention,
    supports,
    takes_latent_products,
    write_tokens,
)
from pallas_kernels.paged_attention import latent_attention as attend_to_latent
from pallas_kernels.quantized_matmul import HeldWeight

# DeepSeek's code has this one for the norms of both low-rank forms, whatever the model's own epsilon is
_NORM_EPSILON = 1e-6


@flax.struct.dataclass
class LatentAttentionParams:
    """The weights of one layer; shards divide the heads.

    The outputs of `down`, which every shard has whole, are the low-rank form of the queries, if there is one, then the
    latent vector of the token and the part of its key that is rotated. `query` makes the queries of all heads, of the
    low-rank form or of the layer's input: first the part without rotation, then the rotated one. `key_up` and
    `value_up` are both parts of the checkpoint's `kv_b_proj`, the former transposed.
    """

    down: Float[Array, "rows dim"] | HeldWeight
    query_norm: Float[Array, " q_lora_rank"] | None
    latent_norm: Float[Array, " kv_lora_rank"]
    query: Float[Array, "heads qk_head_dim inputs"] | HeldWeight
    key_up: Float[Array, "heads kv_lora_rank qk_nope_head_dim"] | HeldWeight
    value_up: Float[Array, "heads v_head_dim kv_lora_rank"] | HeldWeight
    output: Float[Array, "dim heads v_head_dim"] | HeldWeight


def expands(backend: Backend, tokens: int, kv_lora_rank: int, expanded: int) -> bool:
    """Return whether a program for `tokens` tokens expands the prompts that begin in its step.

    It does if a prompt of this length takes fewer products then: for DeepSeek-V3, one of more than 341 tokens. A row
    has `expanded` numbers of a key and a value in each head, besides the rotated ones. A CPU never expands rows, so
    that a token has the same bits whether its prompt is computed whole or in chunks. On a TPU, keys and values of all
    heads would leave its vector memory little room for queries.
    """
    cheaper = tokens * (2 * kv_lora_rank - expanded) > 2 * kv_lora_rank * expanded
    return cheaper and backend.name not in ("cpu", "mosaic_tpu")


@jax.named_scope("attention")
def latent_attention(
    x: Float[Array, "tokens dim"],
    params: LatentAttentionParams,
    batch: TokenBatch,
    kv: KVPools,
    layer: KVLayer,
    rotation: Rotation,
    settings: AttentionSettings,
) -> tuple[Float[Array, "tokens dim"], KVPools]:
    """Attend from the batch's tokens to their sequences, and write the rows of the tokens to `kv`."""
    assert settings.scale is not None
    tokens, heads = len(x), params.query.shape[0]
    rank, plain = params.key_up.shape[1:]
    rotated = params.query.shape[1] - plain
    backend, pool, options = settings.backend, paged_pool(kv, layer.group), AttentionOptions(settings.scale)
    where = layer.index, batch.rows(layer.group), options, backend
    down = linear(x, params.down)
    low_rank = x
    if params.query_norm is not None:
        low_rank = rms_norm(down[:, : params.query_norm.shape[0]], params.query_norm, _NORM_EPSILON)
    query = linear(low_rank, params.query.reshape(heads * (plain + rotated), -1)).reshape(tokens, heads, -1)
    absorbed = linear_by_head(query[..., :plain], params.key_up)
    if _can_expand(batch, query, params, pool, backend) and expands(
        backend, tokens, rank, plain + params.value_up.shape[1]
    ):
        query, row = _rotated(query, down, params, rotation)
        absorbed = jnp.concatenate([absorbed, query[..., plain:]], axis=2)
        pool = write_tokens(row, None, pool, layer.index, batch.rows(layer.group), backend)
        continued = dataclasses.replace(batch.rows(layer.group), num_seqs=batch.num_continued)
        sums, pool = paged_attention(absorbed, None, None, pool, layer.index, continued, options, backend)
        started = _expanded(query, as_stored(row, pool, layer.index), params, batch, pool.page_size, settings)
        is_continued = jnp.arange(tokens) < batch.query_starts[batch.num_continued]
        values = jnp.where(is_continued[:, None, None], linear_by_head(sums, params.value_up), started)
    else:
        if takes_latent_products(backend):
            turns = rotation[0][:, 0, 0], rotation[1][:, 0, 1]
            preparation = LatentPreparation(_NORM_EPSILON, params.latent_norm, turns)
            sums, pool = attend_to_latent(absorbed, query, down, preparation, pool, *where)
        else:
            query, row = _rotated(query, down, params, rotation)
            absorbed = jnp.concatenate([absorbed, query[..., plain:]], axis=2)
            sums, pool = paged_attention(absorbed, row, None, pool, *where)
        values = linear_by_head(sums, params.value_up)
    output = params.output.reshape(params.output.shape[0], -1)
    return row_parallel(values.reshape(tokens, -1), output, None), replace_pool(kv, layer.group, pool)


def _can_expand(
    batch: TokenBatch,
    query: Float[Array, "tokens heads qk_head_dim"],
    params: LatentAttentionParams,
    pool: PagedKV,
    backend: Backend,
) -> bool:
    """Return whether prompts can be expanded: for the order of rows, for the weights, and for the kernel."""
    # Weights that a CPU packs can't be transposed
    if not batch.starts_last or isinstance(params.key_up, HeldWeight):
        return False
    heads, size = query.shape[1], max(query.shape[2], params.value_up.shape[1])
    return supports(backend, Problem(heads, heads, size, pool.page_size, query.dtype, query.dtype))


def _rotated(
    query: Float[Array, "tokens heads qk_head_dim"],
    down: Float[Array, "tokens rows"],
    params: LatentAttentionParams,
    rotation: Rotation,
) -> tuple[Float[Array, "tokens heads qk_head_dim"], Float[Array, "tokens 1 row"]]:
    """Return the queries, of which the last part is rotated, and the rows of the tokens, normalized and rotated."""
    heads, (rank, plain) = query.shape[1], params.key_up.shape[1:]
    width = query.shape[2] - plain
    turned = rotate(jnp.concatenate([query[..., plain:], down[:, None, -width:]], axis=1), *rotation)
    latent = rms_norm(down[:, -rank - width : -width], params.latent_norm, _NORM_EPSILON)
    row = jnp.concatenate([latent[:, None], turned[:, heads:]], axis=2)
    return jnp.concatenate([query[..., :plain], turned[:, :heads]], axis=2), row


def _expanded(
    query: Float[Array, "tokens heads qk_head_dim"],
    row: Float[Array, "tokens 1 row"],
    params: LatentAttentionParams,
    batch: TokenBatch,
    page_size: int,
    settings: AttentionSettings,
) -> Float[Array, "tokens heads v_head_dim"]:
    """Attend from the tokens of rows that begin their sequence to each other; others have unspecified outputs.

    Keys and values, padded to the larger of their sizes, are written to pages that exist only here.
    """
    assert settings.scale is not None
    tokens, heads, _ = query.shape
    rank, width = params.key_up.shape[1], params.value_up.shape[1]
    latent = row[:, 0, :rank]
    keys = jnp.einsum("tr,hrn->thn", latent, params.key_up, preferred_element_type=latent.dtype)
    keys = jnp.concatenate([keys, jnp.broadcast_to(row[..., rank:], (tokens, heads, row.shape[2] - rank))], axis=2)
    values = linear(latent, params.value_up.reshape(heads * width, rank)).reshape(tokens, heads, width)
    size = max(query.shape[2], width)
    query, keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]))) for x in (query, keys, values))
    rows, pool = _own_pages(batch, query, page_size, settings.backend)
    options = AttentionOptions(settings.scale)
    out, _ = paged_attention(query, keys, values, pool, 0, rows, options, settings.backend)
    return out[..., :width]


def _own_pages(
    batch: TokenBatch, query: Float[Array, "tokens heads size"], page_size: int, backend: Backend
) -> tuple[Rows, PagedKV]:
    """Return the rows that begin their sequence, over a pool that has pages for the tokens of the batch alone."""
    tokens, heads, size = query.shape
    lengths = jnp.diff(batch.query_starts)
    pages = -(-lengths // page_size)
    most = -(-tokens // page_size)
    layout = kv_layout(
        num_layers=1,
        num_pages=len(lengths) + most,
        page_size=page_size,
        num_kv_heads=heads,
        head_dim=size,
        dtype=query.dtype,
        platform=kv_platform(backend),
    )
    pool = layout.paged_kv(*(lax.empty(shape, layout.dtype) for shape in (layout.shape, layout.values_shape)))
    table = (jnp.cumsum(pages) - pages)[:, None] + jnp.arange(most, dtype=jnp.int32)
    table = jnp.minimum(table, layout.num_pages - 1).astype(jnp.int32)
    counts = batch.num_continued, batch.num_seqs
    return Rows(table, batch.query_starts, lengths, *counts, chunks_only=True), pool
