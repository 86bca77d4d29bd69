"""The program that draws tokens within a grammar, from the hidden states that the last step left in the slots.

Which tokens a grammar allows depends on the token before, so the host finds it out while the next step's forward pass
is already running. That step therefore draws no token for such a request, and only keeps its last hidden state. This
program draws the token once the host knows what is allowed, before the step that computes it. A token that the grammar
leaves no choice for is set without drawing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxserve.layers.axes import DATA_AXIS
from jaxserve.layers.vocabulary import shard_index
from jaxserve.models.registry import family
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.buckets import smallest_fitting, token_buckets
from jaxserve.runtime.step.handoff import Feedback, feedback_of
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, Shapes, StepContext
from jaxserve.runtime.step.sampling import DrawnRows, Logprobs
from jaxserve.runtime.step.state import DeviceState
from jaxserve.runtime.step.step import sample_rows
from jaxserve.step_plan import Capacity, Draw

_SMALLEST = 8
_WORD = 32


@flax.struct.dataclass
class DrawOutput:
    """The tokens drawn, and their log probabilities; with pipeline stages, also what the first one needs to know."""

    tokens: Int[Array, " rows"]
    logprobs: Logprobs | None
    feedback: Feedback | None = None


def draw_sizes(capacity: Capacity) -> list[int]:
    """Return the numbers of rows that the programs hold: `smallest_draw`, and 8 doubled up to the number of slots.

    The smallest is 1 on a CPU, where rows without a request cost much, and 8 elsewhere: on a GPU, the product of one
    row and the head takes a copy of the head in float32.
    """
    smallest = capacity.smallest_draw
    sizes = {smallest, *token_buckets(max(capacity.num_slots, smallest), smallest=_SMALLEST)}
    return sorted(sizes)


@functools.cache
def draw_packing(size: int, vocab_size: int) -> InputPacking:
    """Return the layout of a program's input: `num_live` rows draw, and the others have a `token`.

    `allowed` has a bit for each token of the padded vocabulary, by row; the lowest bit of a word is its first token.
    """
    return InputPacking(
        [
            PackedField("num_live"),
            PackedField("slots", size, fill=-1),
            PackedField("tokens", size),
            PackedField("allowed", size * num_words(vocab_size)),
        ]
    )


def num_words(vocab_size: int) -> int:
    """Return the number of words that hold a bit for each token."""
    return -(-vocab_size // _WORD)


def pack_draws(draws: list[Draw], capacity: Capacity) -> tuple[ProgramKey, np.ndarray, list[int]]:
    """Return the program for the draws, its input `[ranks, size]`, and the row of each draw in its rank."""
    by_rank: list[list[int]] = [[] for _ in range(capacity.num_ranks)]
    for index in sorted(range(len(draws)), key=lambda index: draws[index].token is not None):
        by_rank[draws[index].rank].append(index)
    most = max(map(len, by_rank))
    size = smallest_fitting(draw_sizes(capacity), most)
    packing, words = draw_packing(size, capacity.vocab_size), num_words(capacity.vocab_size)
    rows = [0] * len(draws)
    packed = []
    for indices in by_rank:
        own = [draws[index] for index in indices]
        for row, index in enumerate(indices):
            rows[index] = row
        masks = [draw.allowed[: 4 * words].ljust(4 * words, b"\0") for draw in own if draw.token is None]
        packed.append(
            packing.pack(
                {
                    "num_live": [len(masks)],
                    "slots": [draw.slot for draw in own],
                    "tokens": [draw.token or 0 for draw in own],
                    "allowed": np.frombuffer(b"".join(masks), np.int32),  # type: ignore[dict-item]
                }
            )
        )
    return ProgramKey("draw", size), np.stack(packed), rows


def _make(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    packing = draw_packing(key.size, capacity.vocab_size)
    return lambda params, state, packed: _draw(params, state, packing.unpack(packed), context)


def _output(shapes: Shapes, key: ProgramKey) -> DrawOutput:
    ranks = PartitionSpec(DATA_AXIS)
    feedback = partitions(feedback_of(shapes.state, shapes.context.model))
    return DrawOutput(ranks, Logprobs(ranks, ranks, ranks), feedback)  # type: ignore[arg-type]


DRAW = ProgramKind(
    name="draw",
    keys=lambda capacity: [ProgramKey("draw", size) for size in draw_sizes(capacity) if capacity.generates],
    make=_make,
    packing=lambda capacity, key: draw_packing(key.size, capacity.vocab_size),
    output=_output,
    where_drawn=True,
)


def _draw(
    params: Any, state: DeviceState, fields: dict[str, jax.Array], context: StepContext
) -> tuple[DeviceState, DrawOutput]:
    model = context.model
    slots, live = fields["slots"], fields["num_live"]
    assert state.hidden is not None
    assert state.counts is not None
    own = jnp.maximum(slots, 0)
    draws = jnp.arange(len(slots), dtype=jnp.int32) < live
    rows = DrawnRows(own, state.seq_lens[own], draws, allowed=fields["allowed"].reshape(len(slots), -1))
    logits = functools.partial(family(model).head, model, context.own_weights(params))
    tokens, logprobs = sample_rows(logits, state.hidden[own], rows, live, state, context, greedy=False)
    tokens = jnp.where(draws, tokens, fields["tokens"])
    with jax.named_scope("write_state"):
        count, num_slots = draws & (slots >= 0), len(state.seq_lens)
        columns = shard_index(tokens, state.counts.shape[1])
        state = dataclasses.replace(
            state,
            last_tokens=state.last_tokens.at[jnp.where(slots < 0, num_slots, slots)].set(tokens, mode="drop"),
            counts=state.counts.at[jnp.where(count, slots, num_slots), columns].add(1, mode="drop"),
        )
    assert logprobs is not None
    return state, DrawOutput(tokens, logprobs, feedback_of(state, model))
