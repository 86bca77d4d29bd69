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
from jaxserve.params import KVSpec
from jaxserve.runtime.devices.mesh import make_mesh, partitions
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
) -> Any:
    def logits(params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
        size = len(tokens)
        kv = empty_pools(model, size, kv_dtype, kv_scales)
        batch = whole_prompt(tokens, length, len(kv))
        x = family(model).embed(model, params, batch)
        return family(model).head(model, params, forward(model, params, x, batch, kv, backend).hidden)

    specs = partitions(abstract or abstract_params(model, np.dtype(dtype)))
    parts = (specs, PartitionSpec(), PartitionSpec())
    out = PartitionSpec(None, TENSOR_AXES)
    return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=parts, out_specs=out, check_vma=False))


def whole_prompt(tokens: jax.Array, length: jax.Array, groups: int = 1) -> TokenBatch:
    """Return the first `length` tokens as one row, whose pages are the first ones of each of the KV groups."""
    size = len(tokens)
    return TokenBatch(
        tokens=tokens,
        positions=jnp.arange(size, dtype=jnp.int32),
        fill_lens=jnp.broadcast_to(length, (size,)),
        page_tables=(jnp.arange(-(-size // PAGE_SIZE), dtype=jnp.int32)[None],) * groups,
        query_starts=jnp.stack([jnp.int32(0), length]),
        kv_lens=length[None],
        num_decodes=jnp.int32(0),
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

    return tuple(map(pool, specs, kv_scales or [None] * len(specs)))


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
