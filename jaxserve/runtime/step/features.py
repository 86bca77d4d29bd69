"""Keeps the features of each token that a head needs from the model, on the pages of the first KV group.

So a head can draft for a sequence at any time, also after a cached prefix. Each shard keeps a part of the features, as
it keeps only a part of the keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.axes import TENSOR_AXES, tensor_rank
from jaxserve.layers.batch import LayerOutput
from jaxserve.models.registry import family
from jaxserve.runtime.step.batch import StepInput
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.runtime.step.state import Drafts


@jax.named_scope("features")
def keep_features(drafts: Drafts, drafter: DraftModel, params: Any, of_model: LayerOutput, inputs: StepInput) -> Drafts:
    """Keep the features of a step's tokens; `params` are those of the head."""
    pool, batch = drafts.features, inputs.batch
    assert pool is not None
    found = family(drafter.model).features(drafter.model, params, of_model)
    num_pages, page_size, width = pool.shape
    page = batch.page_tables[0][inputs.token_row, batch.positions // page_size]
    page = jnp.where(batch.live, page, num_pages + jnp.arange(len(page), dtype=jnp.int32))
    own = lax.dynamic_slice_in_dim(found, tensor_rank() * width, width, axis=1).astype(pool.dtype)
    return dataclasses.replace(
        drafts, features=pool.at[page, batch.positions % page_size].set(own, mode="drop", unique_indices=True)
    )


def kept_features(
    drafts: Drafts, tables: Int[Array, "rows max_pages"], row: Int[Array, " tokens"], positions: Int[Array, " tokens"]
) -> Float[Array, "tokens dim"]:
    """Return the features of tokens of sequences; `tables` are their pages."""
    assert drafts.features is not None
    page_size = drafts.features.shape[1]
    page = tables[row, jnp.minimum(positions // page_size, tables.shape[1] - 1)]
    own = drafts.features.at[page, positions % page_size].get(mode="clip")
    return lax.all_gather(own, TENSOR_AXES, axis=1, tiled=True)
