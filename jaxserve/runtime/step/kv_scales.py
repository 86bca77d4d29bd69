"""The program that calculates the scales of an fp8 KV cache from the first prompts, before any page is written.

It runs the model over the tokens as if they were one prompt, with a small pool of its own in the type of activations,
and takes the largest key and value of each layer. The constants are vLLM's: they leave room for larger ones later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.axes import TENSOR_AXES
from jaxserve.layers.batch import TokenBatch, paged_pool
from jaxserve.models.registry import family, forward
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, StepContext
from jaxserve.runtime.step.state import DeviceState
from jaxserve.step_plan import Capacity
from jaxserve.weights.scales import SMALLEST_INPUT_SCALE
from pallas_kernels.paged_attention import PagedKV

TOKENS = 512
"""The most tokens that scales are calculated from."""

# The numbers as which the largest key and value so far are stored; the largest number of float8_e4m3fn is 448.
_STORED_AS = (200.0, 100.0)


def num_tokens(capacity: Capacity) -> int:
    """Return the number of tokens that the program of a deployment takes."""
    return min(TOKENS, capacity.token_buckets[-1], capacity.max_model_len)


def scales_packing(size: int) -> InputPacking:
    """Return the layout of the input for up to `size` tokens."""
    return InputPacking([PackedField("num_tokens"), PackedField("tokens", size)])


def pack_prompts(tokens: Sequence[int], capacity: Capacity) -> np.ndarray:
    """Return the input `[ranks, size]` for the first of these tokens, the same for all ranks."""
    size = num_tokens(capacity)
    packed = scales_packing(size).pack({"num_tokens": [min(len(tokens), size)], "tokens": tokens[:size]})
    return np.stack([packed] * capacity.num_ranks)


def _make(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    def kv_scales(params: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, tuple[()]]:
        """Return the state with new scales, the same for all ranks; without tokens, scales stay as they were."""
        largest = _largest(context.own_weights(params), state.kv, packed, context, capacity)
        return dataclasses.replace(state, kv=tuple(map(_with_scales, state.kv, largest))), ()

    return kv_scales


KV_SCALES_KEY = ProgramKey("kv_scales")
KV_SCALES = ProgramKind(
    name="kv_scales",
    keys=lambda capacity: [KV_SCALES_KEY],
    make=_make,
    packing=lambda capacity, key: scales_packing(num_tokens(capacity)),
    wants=lambda config: config.calculate_kv_scales,
    compiles_long=True,
)


def _largest(
    params: Any, kv: tuple[PagedKV, ...], packed: jax.Array, context: StepContext, capacity: Capacity
) -> list[Float[Array, "2 layers"]]:
    """Return the largest key and value of each layer over all heads, by KV group."""
    size = num_tokens(capacity)
    fields = scales_packing(size).unpack(packed)
    length, position = fields["num_tokens"], jnp.arange(size, dtype=jnp.int32)
    pages = -(-size // capacity.page_size)
    batch = TokenBatch(
        tokens=fields["tokens"],
        positions=jnp.where(position < length, position, 0),
        fill_lens=jnp.full((size,), length),
        page_tables=(jnp.arange(pages, dtype=jnp.int32)[None],) * len(kv),
        query_starts=jnp.stack([jnp.zeros_like(length), length]),
        kv_lens=length[None],
        num_decodes=jnp.zeros_like(length),
        num_seqs=(length > 0).astype(jnp.int32),
    )
    x = family(context.model).embed(context.model, params, batch)
    own_pools = tuple(_own_pool(pool, pages, x.dtype) for pool in kv)
    filled = forward(context.model, params, x, batch, own_pools, context.backend).kv
    specs = context.model.kv_specs()
    return [_largest_of_pool(paged_pool(filled, i), pages, spec.head_dim) for i, spec in enumerate(specs)]


def _own_pool(pool: PagedKV, pages: int, dtype: jnp.dtype) -> PagedKV:
    """Return an empty pool like `pool`, without scales, for `pages` pages of each layer."""
    axis = 0 if pool.page_major else 1

    def empty(array: jax.Array) -> jax.Array:
        shape = list(array.shape)
        shape[axis] = pages * pool.num_layers if shape[axis] else 0
        return jnp.zeros(shape, dtype)

    return dataclasses.replace(pool, keys=empty(pool.keys), values=empty(pool.values), scales=None)


def _largest_of_pool(pool: PagedKV, pages: int, head_dim: int) -> Float[Array, "2 layers"]:
    if not pool.num_layers:
        return jnp.zeros((2, 0), jnp.float32)
    entries = jnp.arange(pool.num_layers * pages, dtype=jnp.int32).reshape(pool.num_layers, pages)
    found = [jnp.abs(pool.gather(which, entries, head_dim)).max(axis=(0, 2, 3, 4)) for which in (0, 1)]
    return lax.pmax(jnp.stack(found).astype(jnp.float32), TENSOR_AXES)


def _with_scales(pool: PagedKV, largest: Float[Array, "2 layers"]) -> PagedKV:
    """Return the pool with scales for these largest keys and values. A layer without keys and values, or with ones so
    near 0 that later ones would not fit, keeps its scale."""
    assert pool.scales is not None
    scales = (largest / jnp.array(_STORED_AS)[:, None])[:, :, None]
    scales = jnp.where(jnp.isfinite(scales) & (scales >= SMALLEST_INPUT_SCALE), scales, pool.scales)
    return dataclasses.replace(pool, scales=scales)
