"""Declares the parameters of what some families have in place of attention: latent attention, gated delta nets."""

from __future__ import annotations

from typing import Any

from jaxserve.layers.delta_net import DeltaNetParams
from jaxserve.layers.latent_attention import LatentAttentionParams
from jaxserve.layers.rope import RopeConfig, head_order
from jaxserve.models.config import DeltaSizes, ModelConfig
from jaxserve.models.parameters import ParamSpecs
from jaxserve.params import Order, TensorPart, View


def latent_attention(declare: ParamSpecs, name: str, config: ModelConfig, rope: RopeConfig) -> LatentAttentionParams:
    """Return the weights of latent attention under `name`, of the config's sizes."""
    sizes = config.latent
    assert sizes is not None
    heads, dim, rank, low_rank = config.num_heads, config.hidden_size, sizes.kv_lora_rank, sizes.q_lora_rank
    plain, size, inputs = sizes.qk_nope_head_dim, sizes.v_head_dim, low_rank or dim
    turned = head_order(rope, sizes.qk_rope_head_dim) or tuple(range(sizes.qk_rope_head_dim))

    def order(axis: int, first: int) -> Order | None:
        """Return the order that puts the pairs of the rotated part, which begins at `first`, half of it apart."""
        return Order(axis, (*range(first), *(first + i for i in turned))) if rope.interleaved else None

    queries = () if low_rank is None else (TensorPart(f"{name}.q_a_proj.weight", (low_rank, dim), (0, 0)),)
    row = TensorPart(f"{name}.kv_a_proj_with_mqa.weight", (sizes.row, dim), (low_rank or 0, 0), order=order(0, rank))
    query = TensorPart(
        f"{name}.{'q_proj' if low_rank is None else 'q_b_proj'}.weight",
        (heads, sizes.query, inputs),
        (0, 0, 0),
        order=order(1, plain),
    )
    up, transposed = f"{name}.kv_b_proj.weight", View((1, plain, rank), (0, 2, 1))
    starts = [(head, head * (plain + size)) for head in range(heads)]
    keys = tuple(
        TensorPart(up, (1, rank, plain), (head, 0, 0), first_row=at, view=transposed, quantized_view=transposed)
        for head, at in starts
    )
    values = tuple(TensorPart(up, (1, size, rank), (head, 0, 0), first_row=at + plain) for head, at in starts)
    by_head: dict[str, Any] = {"inputs": 1, "by_head": True}
    return LatentAttentionParams(
        down=declare.spec(((low_rank or 0) + sizes.row, None), (dim, None), inputs=1, parts=(*queries, row)),
        query_norm=None if low_rank is None else declare.vector(f"{name}.q_a_layernorm.weight", low_rank),
        latent_norm=declare.vector(f"{name}.kv_a_layernorm.weight", rank),
        query=declare.spec((heads, "heads"), (sizes.query, None), (inputs, None), inputs=1, parts=(query,)),
        key_up=declare.spec((heads, "heads"), (rank, None), (plain, None), parts=keys, **by_head),
        value_up=declare.spec((heads, "heads"), (size, None), (rank, None), parts=values, **by_head),
        output=declare.spec(
            (dim, None),
            (heads, "heads"),
            (size, None),
            inputs=2,
            parts=(TensorPart(f"{name}.o_proj.weight", (dim, heads, size), (0, 0, 0)),),
        ),
    )


def delta_net(declare: ParamSpecs, name: str, config: ModelConfig, *, by_key_head: bool) -> DeltaNetParams:
    """Return the weights of a gated delta net under `name`, of the config's sizes.

    `by_key_head` says that there are two projections, with all rows of a key head side by side. Else there are four,
    and that of queries, keys and values has the queries of all heads first, as the convolution always has.
    """
    sizes, dim = config.delta, config.hidden_size
    assert sizes is not None
    heads, group, gates = sizes.key_heads, sizes.group, sizes.group * sizes.value_dim
    rows, head = sizes.width + gates, (heads, "heads")
    if by_key_head:
        projected: tuple[TensorPart, ...] = (TensorPart(f"{name}.in_proj_qkvz.weight", (heads, rows, dim), (0, 0, 0)),)
        gated: tuple[TensorPart, ...] = (TensorPart(f"{name}.in_proj_ba.weight", (heads, 2, group, dim), (0, 0, 0, 0)),)
    else:
        outputs = TensorPart(f"{name}.in_proj_z.weight", (heads, gates, dim), (0, sizes.width, 0))
        projected = (*_by_kind(f"{name}.in_proj_qkv.weight", sizes, dim), outputs)
        gated = tuple(
            TensorPart(f"{name}.in_proj_{letter}.weight", (heads, 1, group, dim), (0, i, 0, 0))
            for i, letter in enumerate("ba")
        )
    taps = _by_kind(f"{name}.conv1d.weight", sizes, sizes.taps)

    def by_value_head(tensor: str) -> Any:
        spec = declare.spec(head, (group, None), init="zeros", parts=(TensorPart(tensor, (heads, group), (0, 0)),))
        return declare.wide(spec)

    return DeltaNetParams(
        qkvz=declare.spec(head, (rows, None), (dim, None), inputs=1, parts=projected),
        gates=declare.spec(head, (2, None), (group, None), (dim, None), inputs=1, parts=gated),
        conv=declare.spec(head, (sizes.width, None), (sizes.taps, None), by_head=True, parts=taps),
        rate=by_value_head(f"{name}.A_log"),
        bias=by_value_head(f"{name}.dt_bias"),
        norm=declare.wide_norm(f"{name}.norm.weight", sizes.value_dim),
        output=declare.spec(
            (dim, None),
            head,
            (group, None),
            (sizes.value_dim, None),
            inputs=3,
            parts=(TensorPart(f"{name}.out_proj.weight", (dim, heads, group, sizes.value_dim), (0, 0, 0, 0)),),
        ),
    )


def _by_kind(name: str, sizes: DeltaSizes, inner: int) -> tuple[TensorPart, ...]:
    """Return the parts of a tensor with the rows of all queries, then those of all keys, then those of all values."""
    parts, start = [], 0
    for width in (sizes.key_dim, sizes.key_dim, sizes.group * sizes.value_dim):
        first = sizes.key_heads * start
        parts.append(TensorPart(name, (sizes.key_heads, width, inner), (0, start, 0), first_row=first))
        start += width
    return tuple(parts)
