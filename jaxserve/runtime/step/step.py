"""The step program: embed, layers, head and sampling, over the whole mesh, or the part of a pipeline stage.

Its code sees one shard of one rank: `programs/builder.py` wraps it in a `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.layers.axes import DATA_AXIS
from jaxserve.layers.batch import LayerOutput
from jaxserve.layers.vocabulary import mask_padding, shard_index
from jaxserve.models.layout import AnyModel
from jaxserve.models.registry import family, forward
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step import batch as batches
from jaxserve.runtime.step import sampling, verify
from jaxserve.runtime.step.batch import StepInput, StepShape, pack_step, step_packing, step_shape
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.runtime.step.features import keep_features
from jaxserve.runtime.step.groups import in_groups
from jaxserve.runtime.step.handoff import (
    Feedback,
    Handoff,
    feedback_of,
    feedback_specs,
    hand_off,
    handoff_specs,
    whole_hidden,
)
from jaxserve.runtime.step.input_packing import InputPacking
from jaxserve.runtime.step.pooling import pool
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, Shapes, StepContext
from jaxserve.runtime.step.sampling import DrawnRows, Logprobs
from jaxserve.runtime.step.state import DeviceState, Drafts, SlotColumn, expert_tokens_spec
from jaxserve.runtime.step.verify import Drawn
from jaxserve.step_plan import Capacity, StepKind, StepPlan
from pallas_kernels.sampling import row_kernels

# The positions of a prompt whose logits exist at once when log probabilities are computed.
PROMPT_LOGIT_ROWS = 16
PROMPT_LOGIT_ROWS_ON_GPU = 128


@flax.struct.dataclass
class StepOutput:
    """The results of a step. `num_tokens[r]` of `tokens[r]` are valid. Some programs have no logprobs.

    With speculation, the last two columns of `tokens` are counts: of draft tokens compared, and of those accepted. So
    the host fetches one array, not two. Programs that verify have logprobs for each of the tokens.

    The host fetches no `num_tokens`, as it knows which rows draw, and what they accept. But without this output the
    same operations of a program for one row took a CPU 10 to 20 % longer: XLA's runtime starts them in another order.

    `expert_tokens` is a copy, as the next step takes the state's away. With pipeline stages, it counts those of all,
    and `feedback` is for the first one.

    `pooled` has a vector for each row, in steps with prompts where a model pools. One that only pools has no tokens.
    """

    tokens: Int[Array, "rows columns"] | None
    num_tokens: Int[Array, " rows"] | None
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    expert_tokens: UInt32[Array, "mixtures experts"] | None
    feedback: Feedback | None = None
    pooled: Float[Array, "rows size"] | None = None


def _make(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    shape = step_shape(key, capacity)
    if context.model.is_last:
        return lambda params, state, packed, *given: step(params, state, packed, context, shape, *given)
    return lambda params, state, packed, given: stage_step(params, state, packed, context, shape, given)


def _rows(shapes: Shapes, key: ProgramKey) -> tuple[Any, ...]:
    """Return the specs of what a pipeline stage gets from the one before it, or from the last one."""
    model = shapes.context.model
    if model.stage is None:
        return ()
    if model.embeds:
        return (feedback_specs(model, shapes.capacity),)
    return (handoff_of(shapes, key, before=model.stage.first),)


def handoff_of(shapes: Shapes, key: ProgramKey, *, before: int) -> Handoff:
    """Return the specs of what the stages before layer `before` give in a step."""
    context, tokens = shapes.context, step_shape(key, shapes.capacity).tokens
    return handoff_specs(context.model, shapes.capacity, tokens, context.dtype, before=before)


def _output(shapes: Shapes, key: ProgramKey) -> StepOutput | Handoff:
    model = shapes.context.model
    if not model.is_last:
        assert model.stage is not None
        return partitions(handoff_of(shapes, key, before=model.stage.end))
    ranks = PartitionSpec(DATA_AXIS)
    logprobs = Logprobs(ranks, ranks, ranks)  # type: ignore[arg-type]
    counts = expert_tokens_spec(model, shapes.capacity.num_ranks, len(model.config.mixture_layers))
    return StepOutput(
        ranks if model.draws else None,  # type: ignore[arg-type]
        ranks if model.draws else None,  # type: ignore[arg-type]
        None if key.greedy or not model.draws else logprobs,
        logprobs if key.kind == "prompt_logprobs" else None,
        partitions(counts),
        partitions(feedback_of(shapes.state, model)),
        ranks if pools(model, key) else None,  # type: ignore[arg-type]
    )


def pools(model: AnyModel, key: ProgramKey) -> bool:
    """Return whether a program gives the vectors of pooled sequences: steps with prompts do."""
    return model.config.pooling is not None and key.kind in ("mixed", "prompt_logprobs")


def _kind(name: StepKind, **fields: Any) -> ProgramKind:
    """Return the record of a kind of step. Only decode steps have programs without a sampler, if all are greedy.

    A model that only pools has mixed steps alone.
    """

    def keys(capacity: Capacity) -> list[ProgramKey]:
        if capacity.encodes or (not capacity.generates and name != "mixed"):
            return []
        samplers = (True, False) if name == "decode" else (False,)
        return [ProgramKey(name, size, greedy) for size in capacity.buckets(name) for greedy in samplers]

    def packing(capacity: Capacity, key: ProgramKey) -> InputPacking:
        return step_packing(step_shape(key, capacity))

    def pack(plan: StepPlan, capacity: Capacity, key: ProgramKey) -> np.ndarray:
        return pack_step(plan, step_shape(key, capacity), capacity)

    return ProgramKind(
        name=name, keys=keys, make=_make, packing=packing, output=_output, rows=_rows, is_step=True, pack=pack, **fields
    )


STEPS = (
    _kind("decode", num_decoding=lambda capacity, size: size),
    _kind("verify", num_decoding=lambda capacity, size: size // (1 + capacity.max_drafts), compiles_long=True),
    _kind("mixed", compiles_long=True),
    _kind("prompt_logprobs", compiles_long=True),
)


def stage_step(
    params: Any,
    state: DeviceState,
    packed: jax.Array,
    context: StepContext,
    shape: StepShape,
    given: Feedback | Handoff,
) -> tuple[DeviceState, Handoff]:
    """Run the part of a step that a pipeline stage before the last one computes, for one rank."""
    model = context.model
    feedback, before = (given, None) if isinstance(given, Feedback) else (None, given)
    inputs, state = batches.unpack_step(packed, state, shape, feedback, given.seq_lens)
    if before is None:
        x = family(model).embed(model, params, inputs.batch)
    else:
        x = whole_hidden(before, model.config.hidden_size)
    out = forward(model, params, x, inputs.batch, state.pools, context.backend)
    with jax.named_scope("write_state"):
        state = dataclasses.replace(
            _with_states(state.with_pools(out.kv), inputs),
            seq_lens=state.seq_lens.at[inputs.slots].set(inputs.batch.kv_lens, mode="drop"),
            expert_tokens=counted(state, out),
        )
    return state, hand_off(out.hidden, state, before, feedback, context.dtype)


def _with_states(state: DeviceState, inputs: StepInput) -> DeviceState:
    """Return the state with the place of each row's state after the step."""
    rows, states = inputs.batch.states, state.states
    if rows is None or states is None:
        return state
    moved = states.rows.at[inputs.slots].set(rows.targets, mode="drop")
    folded = states.folded.at[inputs.slots].set(rows.folded_after, mode="drop")
    return dataclasses.replace(state, states=dataclasses.replace(states, rows=moved, folded=folded))


def counted(state: DeviceState, out: LayerOutput) -> UInt32[Array, "mixtures experts"] | None:
    """Return how many tokens each expert has computed, with those of a step."""
    loads = state.expert_tokens
    if loads is not None and out.expert_tokens is not None:
        loads += out.expert_tokens.astype(jnp.uint32)
    return loads


def step(
    params: Any,
    state: DeviceState,
    packed: jax.Array,
    context: StepContext,
    shape: StepShape,
    before: Handoff | None = None,
) -> tuple[DeviceState, StepOutput]:
    """Run the step of one rank; on the last of several pipeline stages, its last part, after those `before`."""
    model = family(context.model)
    all_params, params = params, context.own_weights(params)
    inputs, state = batches.unpack_step(packed, state, shape)
    if before is None:
        x = model.embed(context.model, params, inputs.batch)
    else:
        x = whole_hidden(before, context.model.config.hidden_size)
    out = forward(context.model, params, x, inputs.batch, state.pools, context.backend)
    hidden, drafter = out.hidden, context.drafter
    if isinstance(drafter, DraftModel) and drafter.is_head:
        assert state.drafts is not None
        kept = keep_features(state.drafts, drafter, all_params[1], out, inputs)
        state = dataclasses.replace(state, drafts=kept)
    pooling, vectors = context.model.config.pooling, None
    if pooling is not None and pools(context.model, shape.key):
        state, vectors = pool(pooling, params.pooled, hidden, inputs, state, context.backend.target)
    if not context.model.draws:
        return _pooled_only(state, out, inputs, vectors, context, before)
    prompt_logprobs = None
    if inputs.targets is not None:
        prompt_logprobs = _prompt_logprobs(model, params, hidden, inputs, context)
        # Without this barrier XLA merges the head product of prompt positions with that of sampled rows.
        hidden, prompt_logprobs = lax.optimization_barrier((hidden, prompt_logprobs))
    state = _keep_hidden(state, hidden, inputs, shape)
    drawn, logprobs = _draw(model, params, hidden, inputs, state, context, shape)
    with jax.named_scope("write_state"):
        slots = jnp.where(inputs.samples, inputs.slots, state.seq_lens.shape[0])
        assert state.counts is not None
        counts = state.counts
        tokens, last = drawn.tokens, drawn.tokens[:, 0]
        if not shape.key.greedy:
            live = jnp.arange(tokens.shape[1]) < drawn.counts[:, None]
            at = jnp.where(live, slots[:, None], len(counts)).reshape(-1)
            counts = counts.at[at, shard_index(tokens.reshape(-1), counts.shape[1])].add(1, mode="drop")
        if shape.max_drafts:
            last = jnp.take_along_axis(tokens, drawn.counts[:, None] - 1, axis=1)[:, 0]
        loads = counted(state, out)
        drafts, compared = _propose(state, drawn, inputs, context, shape)
        state = dataclasses.replace(
            _with_states(state.with_pools(out.kv), inputs),
            last_tokens=state.last_tokens.at[slots].set(last, mode="drop"),
            seq_lens=state.seq_lens.at[inputs.slots].set(drawn.lengths, mode="drop"),
            counts=counts,
            expert_tokens=loads,
            drafts=drafts,
        )
    num_tokens = jnp.where(inputs.samples, drawn.counts, 0)
    if compared is not None:
        tokens = jnp.concatenate([tokens, compared], axis=1)
    feedback = feedback_of(state, context.model)
    return state, StepOutput(
        tokens, num_tokens, logprobs, prompt_logprobs, _of_all_stages(before, loads), feedback, vectors
    )


def _of_all_stages(
    before: Handoff | None, loads: UInt32[Array, "mixtures experts"] | None
) -> UInt32[Array, "mixtures experts"] | None:
    """Return the counts of experts' tokens of the last stage with those of the stages before it."""
    if before is None or before.expert_tokens is None:
        return loads
    return before.expert_tokens if loads is None else jnp.concatenate([before.expert_tokens, loads])


def _pooled_only(
    state: DeviceState,
    out: LayerOutput,
    inputs: StepInput,
    vectors: Float[Array, "rows size"] | None,
    context: StepContext,
    before: Handoff | None,
) -> tuple[DeviceState, StepOutput]:
    """Return the state and the output of a step of a model that only pools."""
    with jax.named_scope("write_state"):
        loads = counted(state, out)
        state = dataclasses.replace(
            _with_states(state.with_pools(out.kv), inputs),
            seq_lens=state.seq_lens.at[inputs.slots].set(inputs.batch.kv_lens, mode="drop"),
            expert_tokens=loads,
        )
    feedback = feedback_of(state, context.model)
    return state, StepOutput(None, None, None, None, _of_all_stages(before, loads), feedback, vectors)


@jax.named_scope("keep_hidden")
def _keep_hidden(
    state: DeviceState, hidden: Float[Array, "tokens dim"], inputs: StepInput, shape: StepShape
) -> DeviceState:
    """Keep the last hidden state of rows that a grammar constrains: their next token is drawn later."""
    assert state.hidden is not None
    num_slots = len(state.seq_lens)
    constrained = state.sampling.ints[jnp.minimum(inputs.slots, num_slots - 1), SlotColumn.CONSTRAINED] != 0
    if not shape.decode_only:
        hidden = hidden.at[jnp.maximum(inputs.batch.query_starts[1:] - 1, 0)].get(mode="promise_in_bounds")
    at = jnp.where(constrained, inputs.slots, num_slots)
    return dataclasses.replace(state, hidden=state.hidden.at[at].set(hidden.astype(state.hidden.dtype), mode="drop"))


def _propose(
    state: DeviceState, drawn: Drawn, inputs: StepInput, context: StepContext, shape: StepShape
) -> tuple[Drafts | None, Int[Array, "rows 2"] | None]:
    """Return the drafts for the next step, and how many tokens of this step's drafts were compared and accepted."""
    if context.drafter is None:
        return None, None
    assert state.drafts is not None
    if not shape.max_drafts:
        drawn = verify.accept(state.drafts, drawn.tokens, inputs.slots, drawn.counts, drawn.lengths)
    compared = jnp.stack([drawn.proposed, drawn.accepted], axis=1)
    return verify.propose(state, drawn, inputs.slots, inputs.samples, context.drafter), compared


def _draw(
    model: ModuleType,
    params: Any,
    hidden: Float[Array, "tokens dim"],
    inputs: StepInput,
    state: DeviceState,
    context: StepContext,
    shape: StepShape,
) -> tuple[Drawn, Logprobs | None]:
    """Draw a token for each row, and one for each draft token, which is then accepted or not."""
    batch, logits = inputs.batch, functools.partial(model.head, context.model, params)
    if not shape.max_drafts:
        last = jnp.maximum(batch.query_starts[1:] - 1, 0)
        wanted = hidden.at[last].get(mode="promise_in_bounds") if not shape.decode_only else hidden
        rows = DrawnRows(inputs.slots, batch.kv_lens, inputs.samples)
        live = jnp.max(jnp.where(inputs.samples, jnp.arange(1, shape.rows + 1, dtype=jnp.int32), 0))
        tokens, logprobs = sample_rows(logits, wanted, rows, live, state, context, greedy=bool(shape.key.greedy))
        ones = jnp.ones_like(batch.kv_lens)
        return Drawn(tokens[:, None], ones, ones, ones, batch.kv_lens), logprobs
    assert state.drafts is not None
    drawing = verify.drawing_tokens(batch.query_starts, inputs.num_decoding, shape.drawn)
    live = drawing.starts[-1] + drawing.counts[-1]
    slots = inputs.slots[drawing.rows]
    pending = verify.drafts_before(state, jnp.minimum(slots, len(state.seq_lens) - 1), drawing.offset)
    samples = inputs.samples[drawing.rows] & (jnp.arange(shape.drawn) < live)
    rows = DrawnRows(slots, batch.positions[drawing.tokens] + 1, samples, pending)
    wanted = hidden if shape.all_drawn else hidden[drawing.tokens]
    tokens, logprobs = sample_rows(logits, wanted, rows, live, state, context, greedy=False)
    # A row with fewer tokens gets any others.
    of_rows = jnp.minimum(drawing.starts[:, None] + jnp.arange(1 + shape.max_drafts), shape.drawn - 1)
    tokens, logprobs = jax.tree.map(lambda x: x[of_rows], (tokens, logprobs))
    return verify.accept(state.drafts, tokens, inputs.slots, drawing.counts, batch.kv_lens), logprobs


def sample_rows(
    logits_of: Callable[..., Float[Array, "group vocab_shard"]],
    hidden: Float[Array, "rows dim"],
    rows: DrawnRows,
    live: Int[Array, ""],
    state: DeviceState,
    context: StepContext,
    *,
    greedy: bool,
) -> tuple[Int[Array, " rows"], Logprobs | None]:
    """Draw a token for each of the rows, of which the first `live` are needed, in groups of at most
    `context.sample_rows`; `logits_of` takes hidden states and how many of the first rows need logits (None: all).
    """
    rows = rows._replace(slots=jnp.minimum(rows.slots, state.seq_lens.shape[0] - 1))

    def draw(given: tuple[Array, DrawnRows], num_rows: Array | None) -> tuple[Array, Logprobs | None]:
        states, own = given
        logits = mask_padding(logits_of(states, num_rows), context.model.config.vocab_size, num_rows)
        if greedy:
            return sampling.greedy(logits), None
        assert state.counts is not None
        return sampling.sample(logits, state.sampling, state.counts, own, context.backend.target, num_rows)

    if context.sample_rows is None:
        return draw((hidden, rows), None)
    count = len(hidden)
    size = min(context.sample_rows, count)
    padding = -count % size
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))), (hidden, rows))
    tokens, logprobs = jax.tree.map(lambda x: x[:count], in_groups(draw, padded, live, size))
    return tokens, logprobs


def _prompt_logprobs(
    model: ModuleType, params: Any, hidden: Float[Array, "tokens dim"], inputs: StepInput, context: StepContext
) -> Logprobs:
    """Return log probabilities of each position's next token; computes logits for a few positions at a time."""
    assert inputs.targets is not None
    tokens, target = hidden.shape[0], context.backend.target

    def scored(block: tuple[Array, Array]) -> Logprobs:
        logits = mask_padding(model.head(context.model, params, block[0]), context.model.config.vocab_size)
        return sampling.logprobs(logits, block[1], target)

    if row_kernels(target) is not None:
        # The loop is unrolled, so that the program stays one graph.
        groups: list[Logprobs] = []
        for start in range(0, tokens, PROMPT_LOGIT_ROWS_ON_GPU):
            part = slice(start, start + PROMPT_LOGIT_ROWS_ON_GPU)
            # Without this barrier XLA merges the products, and the logits of all groups exist at once.
            block, groups = lax.optimization_barrier(((hidden[part], inputs.targets[part]), groups))
            groups.append(scored(block))
        return jax.tree.map(lambda *x: jnp.concatenate(x), *groups)
    padding = -tokens % PROMPT_LOGIT_ROWS
    blocks = (
        jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, PROMPT_LOGIT_ROWS, hidden.shape[1]),
        jnp.pad(inputs.targets, (0, padding)).reshape(-1, PROMPT_LOGIT_ROWS),
    )
    found = lax.map(scored, blocks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], found)
