"""The program that draws tokens within a grammar, from the hidden states that the last step left in the slots.

Which tokens a grammar allows depends on the token before, so the host finds it out while the next step's forward pass
is already running. That step therefore draws no token for such a request, and only keeps its last hidden state. This
program draws the token once the host knows what is allowed, before the step that computes it. A token that the grammar
leaves no choice for is set without drawing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.layers.axes import DATA_AXIS
from jaxserve.layers.embedding import shard_index
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.buckets import smallest_fitting, token_buckets
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.sampling import DrawnRows, Logprobs
from jaxserve.runtime.step.state import DeviceState, all_ranks, one_rank
from jaxserve.runtime.step.step import StepContext, gathered, sample_rows
from jaxserve.step_plan import Capacity, Draw

_SMALLEST = 8
_WORD = 32


@dataclasses.dataclass(frozen=True)
class DrawKey:
    """Identifies the program that draws for at most `size` rows."""

    size: int

    def __str__(self) -> str:
        return f"draw-{self.size}"


@flax.struct.dataclass
class DrawOutput:
    """The tokens drawn, and their log probabilities."""

    tokens: Int[Array, " rows"]
    logprobs: Logprobs | None


def draw_keys(capacity: Capacity) -> list[DrawKey]:
    """Return the keys of the programs: for the smallest number of rows, and for 8 doubled.

    The smallest is 1 on a CPU, where rows without a request cost much, and 8 elsewhere: on a GPU, the product of one
    row and the head takes a copy of the head in float32.
    """
    smallest = capacity.smallest_draw
    sizes = {smallest, *token_buckets(max(capacity.num_slots, smallest), smallest=_SMALLEST)}
    return [DrawKey(size) for size in sorted(sizes)]


@functools.cache
def draw_packing(key: DrawKey, vocab_size: int) -> InputPacking:
    """Return the layout of a program's input: `num_live` rows draw, and the others have a `token`.

    `allowed` has a bit for each token of the padded vocabulary, by row; the lowest bit of a word is its first token.
    """
    return InputPacking(
        [
            PackedField("num_live"),
            PackedField("slots", key.size, fill=-1),
            PackedField("tokens", key.size),
            PackedField("allowed", key.size * num_words(vocab_size)),
        ]
    )


def num_words(vocab_size: int) -> int:
    """Return the number of words that hold a bit for each token."""
    return -(-vocab_size // _WORD)


def pack_draws(draws: list[Draw], capacity: Capacity, vocab_size: int) -> tuple[DrawKey, np.ndarray, list[int]]:
    """Return the program for the draws, its input `[ranks, size]`, and the row of each draw in its rank."""
    by_rank: list[list[int]] = [[] for _ in range(capacity.num_ranks)]
    for index in sorted(range(len(draws)), key=lambda index: draws[index].token is not None):
        by_rank[draws[index].rank].append(index)
    most = max(map(len, by_rank))
    key = DrawKey(smallest_fitting([one.size for one in draw_keys(capacity)], most))
    packing, words = draw_packing(key, vocab_size), num_words(vocab_size)
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
    return key, np.stack(packed), rows


def pack_no_draws(key: DrawKey, capacity: Capacity, vocab_size: int) -> np.ndarray:
    """Return the input of a program for no request."""
    return np.stack([draw_packing(key, vocab_size).pack({})] * capacity.num_ranks)


def make_draw(
    context: StepContext,
    key: DrawKey,
    mesh: Mesh,
    param_specs: Any,
    state_specs: DeviceState,
    *,
    replicate_output: bool = False,
) -> Callable[..., tuple[DeviceState, DrawOutput]]:
    """Return the function `(params, state, packed) -> (state, output)` of a program, over global arrays.

    With `replicate_output`, every device holds the output of all ranks.
    """
    state_parts, ranks = partitions(state_specs), PartitionSpec(DATA_AXIS)

    def body(params: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, DrawOutput]:
        new_state, output = map(all_ranks, _draw(params, one_rank(state), one_rank(packed), context, key))
        if replicate_output:
            output = jax.tree.map(lambda x: gathered(x, ranks), output)
        return new_state, output

    body.__name__ = str(key).replace("-", "_")
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(partitions(param_specs), state_parts, ranks),
        out_specs=(state_parts, PartitionSpec() if replicate_output else ranks),
        check_vma=False,
    )


def _draw(
    params: Any, state: DeviceState, packed: jax.Array, context: StepContext, key: DrawKey
) -> tuple[DeviceState, DrawOutput]:
    model: ModelConfig = context.model
    fields = draw_packing(key, model.padded_vocab_size).unpack(packed)
    slots, live = fields["slots"], fields["num_live"]
    own = jnp.maximum(slots, 0)
    draws = jnp.arange(key.size, dtype=jnp.int32) < live
    rows = DrawnRows(own, state.seq_lens[own], draws, allowed=fields["allowed"].reshape(key.size, -1))
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
    return state, DrawOutput(tokens, logprobs)
