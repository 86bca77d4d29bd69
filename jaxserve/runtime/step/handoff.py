"""What pipeline stages give each other: hidden states to the next one, and tokens from the last one to the first.

Each stage has programs of its own, with the layers that it holds. Those of the first stage take a `Feedback`, those of
the others a `Handoff`, which go from devices to devices (`programs/transfers.py`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.api_types import MAX_LOGPROBS
from jaxserve.layers.axes import TENSOR_AXES, tensor_rank
from jaxserve.models.layout import AnyModel
from jaxserve.runtime.step.sampling import Logprobs
from jaxserve.runtime.step.state import ArraySpec, DeviceState, expert_tokens_spec
from jaxserve.step_plan import Capacity

_I32, _F32 = np.dtype(np.int32), np.dtype(np.float32)


@flax.struct.dataclass
class Handoff:
    """What a stage gives the next one. Each shard gives a part of the hidden states, if it can be divided.

    With speculation, `seq_lens` are the lengths by slot that the first stage got from the last one. `expert_tokens` are
    counts of all stages so far.
    """

    hidden: Float[Array, "tokens dim_shard"]
    seq_lens: Int[Array, " slots"] | None
    expert_tokens: UInt32[Array, "mixtures experts"] | None


@flax.struct.dataclass
class Feedback:
    """What the last stage gives the first: by slot, the last token, and with speculation, the length and the drafts.

    It is right for every slot that no later step has computed.
    """

    last_tokens: Int[Array, " slots"]
    seq_lens: Int[Array, " slots"] | None
    drafts: Int[Array, "slots max_drafts"] | None


def feedback_of(state: DeviceState, model: AnyModel) -> Feedback | None:
    """Return what the last stage gives back from its state, or from its specs; None if the model has no stages."""
    if model.stage is None:
        return None
    if state.drafts is None:
        return Feedback(state.last_tokens, None, None)
    return Feedback(state.last_tokens, state.seq_lens, state.drafts.tokens)


def feedback_specs(model: AnyModel, capacity: Capacity) -> Feedback:
    """Return the specs of a `Feedback`."""

    def by_slot(*width: int) -> Any:
        return ArraySpec((capacity.num_ranks, capacity.num_slots, *width), _I32, ("ranks", None, *(None,) * len(width)))

    drafts = capacity.max_drafts
    return Feedback(by_slot(), by_slot() if drafts else None, by_slot(drafts) if drafts else None)


def handoff_specs(model: AnyModel, capacity: Capacity, tokens: int, dtype: np.dtype, *, before: int) -> Handoff:
    """Return the specs of what the stages before layer `before` give in a step of `tokens` tokens."""
    dim = model.config.hidden_size
    divided = "features" if dim % model.shards == 0 else None
    hidden = ArraySpec((capacity.num_ranks, tokens, dim), dtype, ("ranks", None, divided))
    mixtures = sum(layer < before for layer in model.config.mixture_layers)
    counts = expert_tokens_spec(model, capacity.num_ranks, mixtures)
    return Handoff(hidden, feedback_specs(model, capacity).seq_lens, counts)  # type: ignore[arg-type]


def whole_hidden(given: Handoff, dim: int) -> Float[Array, "tokens dim"]:
    """Return the hidden states that the stage before gave, of which this shard got a part."""
    hidden = given.hidden
    return hidden if hidden.shape[1] == dim else lax.all_gather(hidden, TENSOR_AXES, axis=1, tiled=True)


def hand_off(
    hidden: Float[Array, "tokens dim"],
    state: DeviceState,
    before: Handoff | None,
    feedback: Feedback | None,
    dtype: np.dtype,
) -> Handoff:
    """Return what this shard gives the next stage, after what it got itself."""
    assert hidden.dtype == dtype, hidden.dtype
    shards, width = math.prod(map(lax.axis_size, TENSOR_AXES)), hidden.shape[1]
    if width % shards == 0:
        size = width // shards
        hidden = lax.dynamic_slice_in_dim(hidden, tensor_rank() * size, size, axis=1)
    earlier, own = None if before is None else before.expert_tokens, state.expert_tokens
    counts = [one for one in (earlier, own) if one is not None]
    given = before or feedback
    assert given is not None
    return Handoff(hidden, given.seq_lens, jnp.concatenate(counts) if counts else None)


def result_specs(
    model: AnyModel,
    capacity: Capacity,
    rows: int,
    *,
    columns: tuple[int, ...] = (),
    logprobs: bool = True,
    prompt: int = 0,
    pooled: bool = False,
    gathered: bool,
) -> dict[str, Any]:
    """Return the specs of what the host reads of an output, by the names of its fields.

    Each of the `rows` has `columns` of tokens, or just one; with `logprobs`, log probabilities of each. `prompt`
    positions have some of the prompt. With `pooled`, each row has a vector. If the output is `gathered`, each device
    has all of it.
    """
    top = min(MAX_LOGPROBS, capacity.vocab_size)
    ranks = None if gathered else "ranks"

    def array(dtype: np.dtype, *shape: int) -> Any:
        return ArraySpec((capacity.num_ranks, *shape), dtype, (ranks, *(None,) * len(shape)))

    def of(*shape: int) -> Logprobs:
        return Logprobs(array(_F32, *shape), array(_I32, *shape, top), array(_F32, *shape, top))

    drawn = columns if columns != (1,) else ()
    counted = (columns[0] + 2,) if columns and capacity.max_drafts else columns
    experts = expert_tokens_spec(model, capacity.num_ranks, len(model.config.mixture_layers))
    if experts is not None and gathered:
        experts = dataclasses.replace(experts, axes=(None,) * len(experts.axes))
    draws = capacity.generates
    return {
        "tokens": array(_I32, rows, *counted) if draws else None,
        "logprobs": of(rows, *drawn) if logprobs and draws else None,
        "pooled": array(_F32, rows, capacity.pooled_size) if pooled else None,
        "prompt_logprobs": of(prompt) if prompt else None,
        "expert_tokens": experts if columns else None,
    }
