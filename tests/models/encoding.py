"""Runs whole texts, packed one after the other, through a bidirectional model: the naive way, for comparison."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.layers.batch import TokenBatch
from jaxserve.models.layout import AnyModel
from jaxserve.models.registry import abstract_params, family, forward
from jaxserve.runtime.devices.mesh import partitions
from pallas_kernels.paged_attention import REFERENCE
from tests.models.forward import cpu_mesh

_PADDING = 5
"""Tokens after the last text, so that padding is seen to change nothing."""


def packed_texts(texts: Sequence[Sequence[int]], second_starts: Sequence[int | None] = ()) -> TokenBatch:
    """Return texts as the rows of a batch, with padding after them; each may have a second text from some token on."""
    lengths = [len(text) for text in texts]
    used, size = sum(lengths), sum(lengths) + _PADDING
    seconds = [
        len(text) if start is None else start for text, start in zip(texts, second_starts or [None] * len(texts))
    ]
    types = [int(i >= start) for text, start in zip(texts, seconds) for i in range(len(text))]
    tokens = np.concatenate([*map(np.array, texts), np.full(_PADDING, 3)]).astype(np.int32)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(_PADDING)]).astype(np.int32)
    ends = np.cumsum([0, *lengths, 0]).astype(np.int32)
    return TokenBatch(
        tokens=tokens,
        positions=positions,
        fill_lens=np.repeat([*lengths, 1], [*lengths, size - used]).astype(np.int32),
        page_tables=(),
        query_starts=ends,
        kv_lens=np.array([*lengths, 0], np.int32),
        num_decodes=np.int32(0),
        num_seqs=np.int32(len(texts)),
        token_types=np.array([*types, *[0] * _PADDING], np.int32),
    )


def hidden_states(model: AnyModel, params: Any, batch: TokenBatch) -> np.ndarray:
    """Return the hidden states of all tokens after the last layer, computed on one device."""
    return np.array(_compiled(model, np.dtype(params.embedding.dtype))(params, batch).astype(jnp.float32))


@functools.cache
def _compiled(model: AnyModel, dtype: np.dtype) -> Any:
    def encode(params: Any, batch: TokenBatch) -> jax.Array:
        return forward(model, params, family(model).embed(model, params, batch), batch, (), REFERENCE).hidden

    parts = (partitions(abstract_params(model, dtype)), PartitionSpec())
    return jax.jit(jax.shard_map(encode, mesh=cpu_mesh(), in_specs=parts, out_specs=PartitionSpec(), check_vma=False))
