"""Packs a `StepPlan` into the input of a step program, and unpacks that input inside the program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxserve.layers.batch import TokenBatch
from jaxserve.runtime.step import verify
from jaxserve.runtime.step.handoff import Feedback
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.state import DeviceState, SlotColumn
from jaxserve.step_plan import Capacity, Chunk, StepKind, StepPlan
from pallas_kernels.gated_delta import DeltaRows


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The static sizes of a step program, which draws at most `drawn` tokens.

    `max_drafts` is the length of the longest draft that a row verifies, 0 if it verifies none. `states` says whether
    layers keep states.
    """

    key: ProgramKey
    tokens: int
    rows: int
    pages: int
    groups: int
    drawn: int
    max_drafts: int = 0
    states: bool = False

    @property
    def all_drawn(self) -> bool:
        """Whether every row is a decode with or without drafts, and each of its tokens draws the next one."""
        return self.key.kind == "verify"

    @property
    def decode_only(self) -> bool:
        """Whether every row is a decode, so that each row is one token."""
        return self.key.kind == "decode"


@flax.struct.dataclass
class StepInput:
    """The unpacked input of a step. `samples[r]` says whether row r draws a token after its last position; a row that
    a grammar constrains never does.

    The first `num_decoding` rows are decodes, with or without drafts. `token_row` is the row of each token.
    """

    batch: TokenBatch
    slots: Int[Array, " rows"]
    samples: Bool[Array, " rows"]
    num_decoding: Int[Array, ""]
    targets: Int[Array, " tokens"] | None
    token_row: Int[Array, " tokens"]


def choose_program(plan: StepPlan, capacity: Capacity) -> ProgramKey:
    """Return the smallest program that holds the plan on every rank: all ranks run the same one."""
    kind: StepKind = plan.kind if capacity.generates else "encode" if capacity.encodes else "mixed"
    greedy = None if kind == "encode" else kind == "decode" and plan.greedy
    return ProgramKey(kind, capacity.bucket(kind, plan.size(capacity.num_ranks)), greedy)


def step_shape(key: ProgramKey, capacity: Capacity) -> StepShape:
    """Return the sizes that a program's key implies."""
    groups, size, states = len(capacity.pages_by_group), key.size, capacity.num_states > 0
    if key.kind == "decode":
        return StepShape(key, size, size, size, groups, size, states=states)
    rows = min(capacity.num_slots, size)
    pages = rows + -(-size // capacity.page_size)
    if key.kind == "verify":
        return StepShape(key, size, rows, pages, groups, size, capacity.max_drafts, states)
    if key.kind == "mixed" and capacity.verifies_beside_prompts:
        return StepShape(key, size, rows, pages, groups, capacity.max_drawn(size), capacity.max_drafts, states)
    return StepShape(key, size, rows, pages, groups, rows, states=states)


@functools.cache
def step_packing(shape: StepShape) -> InputPacking:
    """Return the layout of a step program's input."""
    fields = [
        PackedField("num_decodes"),
        PackedField("num_seqs"),
        PackedField("slots", shape.rows, fill=-1),
        PackedField("page_slots", shape.pages, fill=-1),
        PackedField("page_columns", shape.pages),
        *(PackedField(f"page_ids_{group}", shape.pages) for group in range(shape.groups)),
    ]
    if shape.states:
        names = ("state_rows", "snapshot_rows", "snapshot_tokens")
        fields += [PackedField(name, shape.rows, fill=-1) for name in names]
    if not shape.decode_only:
        fields.append(PackedField("ends", shape.rows))
    if not shape.decode_only and not shape.all_drawn:
        fields += [PackedField("num_decoding"), PackedField("samples", shape.rows), PackedField("tokens", shape.tokens)]
    if shape.key.kind == "prompt_logprobs":
        fields.append(PackedField("targets", shape.tokens))
    return InputPacking(fields)


def pack_step(plan: StepPlan, shape: StepShape, capacity: Capacity) -> np.ndarray:
    """Return the packed inputs of all ranks, `[ranks, size]`."""
    table = step_packing(shape)
    by_rank: list[list[Chunk]] = [[] for _ in range(capacity.num_ranks)]
    for chunk in plan.chunks:
        by_rank[chunk.rank].append(chunk)
    return np.stack([table.pack(_fields(chunks, shape, capacity)) for chunks in by_rank])


def _fields(chunks: list[Chunk], shape: StepShape, capacity: Capacity) -> dict[str, list[int]]:
    page_slots: list[int] = []
    page_columns: list[int] = []
    page_ids: list[list[int]] = [[] for _ in range(shape.groups)]
    for chunk in chunks:
        if pages := chunk.new_pages[0]:
            # Pages of tokens that are computed again were there before.
            first = -(-(chunk.start + chunk.length) // capacity.page_size) - len(pages)
            page_slots += [chunk.slot] * len(pages)
            page_columns += range(first, first + len(pages))
            for ids, new in zip(page_ids, chunk.new_pages):
                ids += new
    fields = {
        "num_decodes": [sum(chunk.tokens is None and chunk.length == 1 for chunk in chunks)],
        "num_seqs": [len(chunks)],
        "slots": [chunk.slot for chunk in chunks],
        "page_slots": page_slots,
        "page_columns": page_columns,
        **{f"page_ids_{group}": ids for group, ids in enumerate(page_ids)},
    }
    if shape.states:
        writes = [chunk.state for chunk in chunks]
        snapshots = [None if write is None else write.snapshot for write in writes]
        fields |= {
            "state_rows": [-1 if write is None else write.target for write in writes],
            "snapshot_rows": [-1 if row is None else row for row in snapshots],
            "snapshot_tokens": [-1 if write is None else write.snapshot_tokens for write in writes],
        }
    if shape.decode_only:
        return fields
    if shape.all_drawn:
        return {**fields, "ends": _padded(itertools.accumulate(chunk.length for chunk in chunks), shape.rows)}
    prompts = itertools.takewhile(lambda chunk: chunk.tokens is not None, reversed(chunks))
    continued = [chunk.start > 0 for chunk in prompts]
    assert continued == sorted(continued), "chunks that begin their sequence come last"
    tokens: list[int] = []
    ends: list[int] = []
    for chunk in chunks:
        tokens += chunk.tokens if chunk.tokens is not None else [0] * chunk.length
        ends.append(len(tokens))
    fields |= {
        "num_decoding": [sum(chunk.tokens is None for chunk in chunks)],
        "ends": _padded(ends, shape.rows),
        "samples": [int(chunk.sample) for chunk in chunks],
        "tokens": tokens,
    }
    if shape.key.kind == "prompt_logprobs":
        targets: list[int] = []
        for chunk in chunks:
            targets += (chunk.tokens or [0])[1:]
            targets.append(chunk.target or 0)
        fields["targets"] = targets
    return fields


def _padded(ends: Iterable[int], rows: int) -> list[int]:
    """Return the ends of rows, and of empty rows after them."""
    found = list(ends)
    return found + (found[-1:] or [0]) * (rows - len(found))


@jax.named_scope("read_input")
def unpack_step(
    packed: jax.Array,
    state: DeviceState,
    shape: StepShape,
    feedback: Feedback | None = None,
    seq_lens: Int[Array, " slots"] | None = None,
) -> tuple[StepInput, DeviceState]:
    """Unpack the input inside the program, append new pages to the page tables and gather each row's state by slot.

    Sequence lengths and last tokens are those on the device, as the host may be a step behind. On a stage before the
    last one, the lengths of decodes are `seq_lens`, if they aren't None. The first stage has tokens and drafts of
    `feedback`; the tokens of a stage after it are any.
    """
    fields = step_packing(shape).unpack(packed)
    slots = state.seq_lens.shape[0]
    at = jnp.where(fields["page_slots"] < 0, slots, fields["page_slots"])
    page_tables = tuple(
        table.at[at, fields["page_columns"]].set(fields[f"page_ids_{group}"], mode="drop")
        for group, table in enumerate(state.page_tables)
    )
    state = dataclasses.replace(state, page_tables=page_tables)
    row_slots = jnp.maximum(fields["slots"], 0)
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    token = jnp.arange(shape.tokens, dtype=jnp.int32)
    live = row < fields["num_seqs"]
    num_decoding = fields.get("num_decoding", fields["num_seqs"])
    last_tokens = state.last_tokens if feedback is None else feedback.last_tokens
    drafts = None if state.drafts is None else state.drafts.tokens
    if feedback is not None:
        drafts = feedback.drafts
    samples = fields["samples"] != 0 if "samples" in fields else live
    if shape.decode_only:
        starts = jnp.minimum(jnp.arange(shape.rows + 1, dtype=jnp.int32), fields["num_seqs"])
        tokens, token_row = last_tokens[row_slots], token
    else:
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), fields["ends"]])
        token_row = jnp.searchsorted(fields["ends"], token, side="right", method="compare_all").astype(jnp.int32)
        token_row = jnp.minimum(token_row, shape.rows - 1)
        if shape.max_drafts and drafts is not None:
            tokens = verify.tokens_to_verify(last_tokens, drafts, row_slots, token_row, token - starts[token_row])
        else:
            tokens = last_tokens[row_slots][token_row]
        if not shape.all_drawn:
            tokens = jnp.where(token_row < num_decoding, tokens, fields["tokens"])
    lengths = state.seq_lens[row_slots]
    if seq_lens is not None:
        lengths = jnp.where(row < num_decoding, seq_lens[row_slots], lengths)
    kv_lens = jnp.where(live, lengths + starts[1:] - starts[:-1], 0)
    positions = jnp.where(token < starts[-1], kv_lens[token_row] - starts[token_row + 1] + token, 0)
    ints = state.sampling.ints[row_slots]
    batch = TokenBatch(
        tokens=tokens,
        positions=positions,
        fill_lens=ints[:, SlotColumn.FILL_LEN][token_row],
        page_tables=tuple(table[row_slots] for table in page_tables),
        query_starts=starts,
        kv_lens=kv_lens,
        num_decodes=fields["num_decodes"],
        num_seqs=fields["num_seqs"],
        decode_only=shape.decode_only,
        max_queries=1 + shape.max_drafts if shape.all_drawn else None,
        states=_state_rows(fields, state, shape, row_slots, starts, lengths, num_decoding),
        starts_last=not shape.decode_only and not shape.all_drawn,
    )
    samples = samples & live & (ints[:, SlotColumn.CONSTRAINED] == 0)
    inputs = StepInput(
        batch, jnp.where(live, row_slots, slots), samples, num_decoding, fields.get("targets"), token_row
    )
    return inputs, state


def _state_rows(
    fields: dict[str, jax.Array],
    state: DeviceState,
    shape: StepShape,
    slots: Int[Array, " rows"],
    starts: Int[Array, " rows_plus_1"],
    lengths: Int[Array, " rows"],
    num_decoding: Int[Array, ""],
) -> DeltaRows | None:
    """Return where the states of the rows are read and written; None if layers keep none.

    Of a row that verifies drafts, only the first token can't be rejected.
    """
    states = state.states
    if states is None:
        return None
    queries, sources = starts[1:] - starts[:-1], states.rows[slots]
    certain = queries
    if shape.max_drafts:
        certain = jnp.where(jnp.arange(shape.rows) < num_decoding, jnp.minimum(queries, 1), queries)
    return DeltaRows(
        slots=slots,
        query_starts=starts,
        lens=lengths,
        folded=states.folded[slots],
        certain=lengths + certain,
        sources=sources,
        targets=jnp.where(fields["state_rows"] < 0, sources, fields["state_rows"]),
        snapshots=fields["snapshot_rows"],
        snapshot_lens=fields["snapshot_tokens"],
        num_seqs=fields["num_seqs"],
        decode_only=shape.decode_only,
        max_queries=1 + shape.max_drafts if shape.all_drawn else None,
    )
