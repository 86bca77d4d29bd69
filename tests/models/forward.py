"""Runs a whole prompt through a model as one chunk and returns all logits: the naive way, for comparison."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.layers.axes import TENSOR_AXES
from jaxserve.layers.batch import KVPools, TokenBatch
from jaxserve.models.layout import AnyModel
from jaxserve.models.registry import abstract_params, family, forward
from jaxserve.params import KVSpec, StateSpec
from jaxserve.runtime.devices.mesh import make_mesh, partitions
from pallas_kernels.gated_delta import BLOCK, DeltaLayout, DeltaRows, DeltaStates
from pallas_kernels.paged_attention import REFERENCE, Backend, PagedKV

PAGE_SIZE = 16


@functools.cache
def cpu_mesh() -> Mesh:
    return make_mesh(jax.devices("cpu"))


@functools.cache
def _compiled(
    model: AnyModel,
    dtype: Any,
    kv_dtype: Any,
    backend: Backend,
    mesh: Mesh,
    kv_scales: Any = None,
    abstract: Any = None,
    *,
    has_head: bool = True,
) -> Any:
    def logits(params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
        size = len(tokens)
        kv = empty_pools(model, size, kv_dtype, kv_scales)
        batch = whole_prompt(tokens, length, len(model.kv_specs()))
        x = family(model).embed(model, params, batch)
        hidden = forward(model, params, x, batch, kv, backend).hidden
        return family(model).head(model, params, hidden) if has_head else hidden

    specs = partitions(abstract or abstract_params(model, np.dtype(dtype)))
    parts = (specs, PartitionSpec(), PartitionSpec())
    out = PartitionSpec(None, TENSOR_AXES if has_head else None)
    return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=parts, out_specs=out, check_vma=False))


def whole_prompt(tokens: jax.Array, length: jax.Array, groups: int = 1) -> TokenBatch:
    """Return the first `length` tokens as one row, whose pages are the first ones of each of the KV groups."""
    return chunk(tokens, jnp.int32(0), length, -(-len(tokens) // PAGE_SIZE), groups)


def chunk(tokens: jax.Array, start: jax.Array, length: jax.Array, pages: int, groups: int = 1) -> TokenBatch:
    """Return the first `length` tokens as one row that follows `start` tokens of its sequence, which has `pages`."""
    size = len(tokens)
    return TokenBatch(
        tokens=tokens,
        positions=start + jnp.arange(size, dtype=jnp.int32),
        fill_lens=jnp.broadcast_to(start + length, (size,)),
        page_tables=(jnp.arange(pages, dtype=jnp.int32)[None],) * groups,
        query_starts=jnp.stack([jnp.int32(0), length]),
        kv_lens=(start + length)[None],
        num_decodes=jnp.int32(0),
        num_seqs=jnp.int32(1),
        states=_only_row(start, length),
    )


def _only_row(start: jax.Array, length: jax.Array) -> DeltaRows:
    """Return where the state of the only sequence is, before a chunk of `length` tokens that begins at `start`."""
    zero = jnp.zeros(1, jnp.int32)
    return DeltaRows(
        slots=zero,
        query_starts=jnp.stack([jnp.int32(0), length]),
        lens=start[None],
        folded=start[None] // BLOCK * BLOCK,
        certain=(start + length)[None],
        sources=zero,
        targets=zero,
        snapshots=zero - 1,
        snapshot_lens=zero,
        num_seqs=jnp.int32(1),
    )


def empty_pools(model: AnyModel, size: int, dtype: Any = jnp.float32, kv_scales: Any = None) -> KVPools:
    """Return a shard's part of pools for one sequence of `size` tokens."""
    specs, pages = model.kv_specs(), -(-size // PAGE_SIZE)

    def pool(spec: KVSpec, scales: Any) -> PagedKV:
        shape = (spec.num_kv_heads // model.shards, spec.num_layers * pages, PAGE_SIZE, spec.head_dim)
        scales = None if scales is None else jnp.array(scales, jnp.float32).reshape(2, spec.num_layers, -1)
        keys = jnp.zeros(shape, dtype)
        values = keys if spec.value_dim is None else keys[:, :0]
        return PagedKV(keys, values, spec.num_layers, scales, value_dim=spec.value_dim)

    pools = tuple(map(pool, specs, kv_scales or [None] * len(specs)))
    states = model.state_spec()
    return pools if states is None else (*pools, _empty_states(states, model.shards, dtype))


def _empty_states(spec: StateSpec, shards: int, dtype: Any) -> DeltaStates:
    """Return a shard's part of the state of one sequence."""
    heads = spec.key_heads // shards, spec.value_heads // shards
    layout = DeltaLayout(spec.num_layers, *heads, spec.key_dim, spec.value_dim, spec.taps, np.dtype(dtype))
    (recurrent, tails), (*entries, inputs) = layout.pool_shapes(1), layout.slot_shapes(1)
    kept = [jnp.full(shape, jnp.nan, jnp.float32) for shape in entries]
    return DeltaStates(
        jnp.full(recurrent, jnp.nan, jnp.float32),
        jnp.full(tails, jnp.nan, dtype),
        *kept,
        jnp.full(inputs, jnp.nan, dtype),
    )


def prompt_logits(
    model: AnyModel,
    params: Any,
    tokens: list[int],
    *,
    size: int | None = None,
    kv_dtype: Any = None,
    backend: Backend = REFERENCE,
    mesh: Mesh | None = None,
    kv_scales: Any = None,
    abstract: Any = None,
) -> np.ndarray:
    """Return the logits of all tokens, `[len(tokens), vocab]`, computed on one device or on `model.shards` of a mesh.

    The prompt is padded to `size`, so that prompts of many lengths share a compilation. Keys and values have the
    parameters' type, or are rounded to `kv_dtype`. `kv_scales` are `[2, layers, kv_heads]` of each KV group, in tuples.
    `abstract` is the tree of specs if weights are quantized.
    """
    padded = np.zeros(size or len(tokens), np.int32)
    padded[: len(tokens)] = tokens
    dtype = jax.tree.leaves(params.norm)[0].dtype
    run = _compiled(model, dtype, kv_dtype or dtype, backend, mesh or cpu_mesh(), kv_scales, abstract)
    return np.array(run(params, padded, np.int32(len(tokens))))[: len(tokens), : model.config.vocab_size]


def prompt_hidden(model: AnyModel, params: Any, tokens: list[int], size: int) -> np.ndarray:
    """Return the hidden states of all tokens after the last norm, `[len(tokens), dim]`, computed on one device in
    float32. The prompt is padded to `size`."""
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    f32 = np.dtype(np.float32)
    run = _compiled(model, f32, f32, REFERENCE, cpu_mesh(), has_head=False)
    return np.array(run(params, padded, np.int32(len(tokens))))[: len(tokens)]


def logits_by_chunks(model: AnyModel, params: Any, tokens: list[int], lengths: list[int], *, size: int) -> np.ndarray:
    """Return the logits of all tokens, computed in chunks of these lengths, each padded to `size`."""
    run, kv, start, found = _step(model, size, len(tokens)), empty_pools(model, len(tokens)), 0, []
    for length in lengths:
        ids = np.zeros(size, np.int32)
        ids[:length] = tokens[start : start + length]
        logits, kv = run(params, ids, np.int32(start), np.int32(length), kv)
        found.append(np.array(logits)[:length])
        start += length
    assert start == len(tokens)
    return np.concatenate(found)[:, : model.config.vocab_size]


@functools.cache
def _step(model: AnyModel, size: int, total: int) -> Any:
    """Return the program that computes a chunk in float32, padded to `size`, of a sequence of `total` tokens."""

    def step(params: Any, ids: jax.Array, start: jax.Array, length: jax.Array, kv: KVPools) -> Any:
        batch = chunk(ids, start, length, -(-total // PAGE_SIZE), len(model.kv_specs()))
        out = forward(model, params, family(model).embed(model, params, batch), batch, kv, REFERENCE)
        return family(model).head(model, params, out.hidden), out.kv

    whole = PartitionSpec()
    parts = (partitions(abstract_params(model, np.dtype(np.float32))), *[whole] * 4)
    mapped = jax.shard_map(step, mesh=cpu_mesh(), in_specs=parts, out_specs=(whole, whole), check_vma=False)
    return jax.jit(mapped)
