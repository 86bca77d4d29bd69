"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): all heads read one row a token from the paged cache.

The row has a latent vector, of which each head would make a key and a value, and the part of the key that is rotated.
Both projections are moved out of the attention: a query is multiplied by the weights that make keys, and the weighted
sum of latent vectors by those that make values. So no key and no value of a head ever exists (the absorbed form).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.batch import KVLayer, KVPools, TokenBatch, replace_pool
from jaxserve.layers.linear import linear, linear_by_head, row_parallel
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import Rotation, rotate
from pallas_kernels.paged_attention import AttentionOptions, paged_attention
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
    down = linear(x, params.down)
    low_rank = x
    if params.query_norm is not None:
        low_rank = rms_norm(down[:, : params.query_norm.shape[0]], params.query_norm, _NORM_EPSILON)
    rotated = params.query.shape[1] - plain
    latent = rms_norm(down[:, -rank - rotated : -rotated], params.latent_norm, _NORM_EPSILON)
    query = linear(low_rank, params.query.reshape(heads * (plain + rotated), -1)).reshape(tokens, heads, -1)
    turned = rotate(jnp.concatenate([query[..., plain:], down[:, None, -rotated:]], axis=1), *rotation)
    absorbed = linear_by_head(query[..., :plain], params.key_up)
    attended, pool = paged_attention(
        jnp.concatenate([absorbed, turned[:, :heads]], axis=2),
        jnp.concatenate([latent[:, None], turned[:, heads:]], axis=2),
        None,
        kv[layer.group],
        layer.index,
        batch.rows(layer.group),
        AttentionOptions(settings.scale),
        settings.backend,
    )
    values = linear_by_head(attended, params.value_up).reshape(tokens, -1)
    output = params.output.reshape(params.output.shape[0], -1)
    return row_parallel(values, output, None), replace_pool(kv, layer.group, pool)
