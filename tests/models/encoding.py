"""Runs whole texts, packed one after the other, through a bidirectional model: the naive way, for comparison.

All texts are in one batch, with padding after them, and no kernel is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.layers.batch import TokenBatch
from jaxserve.model_source import ModelSource
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params, family, forward, parse_model_config
from jaxserve.runtime.devices.mesh import partitions, shardings
from jaxserve.weights import build_params, open_weights
from pallas_kernels.paged_attention import REFERENCE
from tests.models.forward import cpu_mesh
from tests.models.pooled import Case, pool, served

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


def load(source: ModelSource, **settings: Any) -> tuple[AnyModel, Any]:
    """Return the model of a checkpoint as these settings serve it, and its parameters in float32."""
    found = served(source, **settings)
    model: AnyModel = LaidOutModel(parse_model_config(found.raw, found.where, found.task))
    abstract = abstract_params(model, np.dtype(np.float32))
    return model, build_params(abstract, shardings(cpu_mesh(), abstract), open_weights(source, abstract))


def encoded(model: AnyModel, params: Any, cases: Sequence[Case]) -> list[np.ndarray]:
    """Return the vector of each case, before normalization or activation."""
    batch = packed_texts([case.ids for case in cases], [case.second_start for case in cases])
    hidden = hidden_states(model, params, batch)
    texts = [hidden[start : start + len(case.ids)] for start, case in zip(batch.query_starts, cases)]
    return [np.array(pool(model.config, params.pooled, text, np.int32(len(text)))) for text in texts]


def difference(model: AnyModel, params: Any, cases: Sequence[Case]) -> float:
    """Return the largest difference of any number of the vectors to the expected ones."""
    pairs = zip(encoded(model, params, cases), cases, strict=True)
    return max(float(np.abs(found - case.vector).max()) for found, case in pairs)


@functools.cache
def _compiled(model: AnyModel, dtype: np.dtype) -> Any:
    def encode(params: Any, batch: TokenBatch) -> jax.Array:
        return forward(model, params, family(model).embed(model, params, batch), batch, (), REFERENCE).hidden

    parts = (partitions(abstract_params(model, dtype)), PartitionSpec())
    return jax.jit(jax.shard_map(encode, mesh=cpu_mesh(), in_specs=parts, out_specs=PartitionSpec(), check_vma=False))
