"""The program of a bidirectional model: whole texts in, a vector of each out, or one of each token.

It needs no cache and leaves nothing on the device but the counts of experts' tokens.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxserve.layers.axes import DATA_AXIS
from jaxserve.layers.batch import TokenBatch
from jaxserve.models.registry import family, forward
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.pooling import pool_texts
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, Shapes, StepContext
from jaxserve.runtime.step.state import DeviceState, expert_tokens_spec
from jaxserve.runtime.step.step import StepOutput, counted
from jaxserve.step_plan import Capacity, Chunk, StepPlan

# The second start of a text that is no pair, past all its tokens
_NO_SECOND = 2**31 - 1


def _keys(capacity: Capacity) -> list[ProgramKey]:
    return [ProgramKey("encode", size) for size in capacity.buckets("encode")] if capacity.encodes else []


@functools.cache
def _packing(tokens: int, texts: int) -> InputPacking:
    return InputPacking(
        [
            PackedField("num_texts"),
            PackedField("ends", texts),
            PackedField("seconds", texts, fill=_NO_SECOND),
            PackedField("tokens", tokens),
        ]
    )


def _packing_of(capacity: Capacity, key: ProgramKey) -> InputPacking:
    return _packing(key.size, min(capacity.num_slots, key.size))


def _pack(plan: StepPlan, capacity: Capacity, key: ProgramKey) -> np.ndarray:
    """Return the packed texts of all ranks, `[ranks, size]`."""
    packing = _packing_of(capacity, key)
    by_rank: list[list[Chunk]] = [[] for _ in range(capacity.num_ranks)]
    for chunk in plan.chunks:
        by_rank[chunk.rank].append(chunk)
    return np.stack([packing.pack(_fields(chunks)) for chunks in by_rank])


def _fields(chunks: list[Chunk]) -> dict[str, list[int]]:
    tokens: list[int] = []
    ends: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens or ()
        ends.append(len(tokens))
    seconds = [_NO_SECOND if chunk.second_start is None else chunk.second_start for chunk in chunks]
    return {"num_texts": [len(chunks)], "ends": ends, "seconds": seconds, "tokens": tokens}


def _unpacked(fields: dict[str, jax.Array]) -> tuple[TokenBatch, Int[Array, " tokens"]]:
    """Return the texts, and the text of each token; for padding, any."""
    num_texts, ends = fields["num_texts"], fields["ends"]
    texts, tokens = len(ends), len(fields["tokens"])
    last = jnp.max(ends)
    ends = jnp.where(jnp.arange(texts) < num_texts, ends, last)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    token = jnp.arange(tokens, dtype=jnp.int32)
    text = jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
    text = jnp.minimum(text, texts - 1)
    positions = jnp.where(token < last, token - starts[text], 0)
    lengths = starts[1:] - starts[:-1]
    batch = TokenBatch(
        tokens=fields["tokens"],
        positions=positions,
        fill_lens=lengths[text],
        page_tables=(),
        query_starts=starts,
        kv_lens=lengths,
        num_decodes=jnp.int32(0),
        num_seqs=num_texts,
        token_types=(positions >= fields["seconds"][text]).astype(jnp.int32),
    )
    return batch, text


def _make(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    packing, model = _packing_of(capacity, key), context.model

    def encode(params: object, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, StepOutput]:
        with jax.named_scope("read_input"):
            batch, text = _unpacked(packing.unpack(packed))
        x = family(model).embed(model, params, batch)
        out = forward(model, params, x, batch, (), context.backend)
        pooling = model.config.pooling
        assert pooling is not None
        vectors = pool_texts(pooling, params.pooled, out.hidden, batch, text, context.backend.target)  # type: ignore[attr-defined]
        loads = counted(state, out)
        state = dataclasses.replace(state, expert_tokens=loads)
        return state, StepOutput(None, None, None, None, loads, pooled=vectors)

    return encode


def _output(shapes: Shapes, key: ProgramKey) -> StepOutput:
    model = shapes.context.model
    counts = expert_tokens_spec(model, shapes.capacity.num_ranks, len(model.config.mixture_layers))
    return StepOutput(None, None, None, None, partitions(counts), pooled=PartitionSpec(DATA_AXIS))  # type: ignore[arg-type]


ENCODE = ProgramKind(
    name="encode", keys=_keys, make=_make, packing=_packing_of, output=_output, is_step=True, pack=_pack
)
