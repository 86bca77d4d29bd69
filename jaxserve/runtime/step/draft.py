"""The programs of a draft model: one reads tokens into its cache, the other makes drafts for the next step.

A draft model follows the sequences only where it drafts: the scheduler knows how far behind it is. So both programs
find their tokens in `Drafts.history`, at places relative to the length of the sequence, which the device knows.
Drafting first computes the last tokens of a sequence again (see `DraftModel.last`).

Each draft token is drawn as the target will draw at its place: with the request's own parameters and noise.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import TokenBatch, paged_pool
from jaxserve.models.registry import family, forward
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.buckets import smallest_fitting
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.runtime.step.features import kept_features
from jaxserve.runtime.step.handoff import feedback_of
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, Shapes, StepContext
from jaxserve.runtime.step.sampling import DrawnRows
from jaxserve.runtime.step.state import DeviceState, SlotColumn
from jaxserve.runtime.step.step import sample_rows
from jaxserve.step_plan import Capacity, Chunk, DraftRead, StepPlan
from pallas_kernels.paged_attention import PagedKV
from pallas_kernels.sampling import row_kernels


@functools.cache
def read_packing(size: int, rows: int) -> InputPacking:
    """Return the layout of the input of a program that reads `size` tokens of at most `rows` sequences."""
    return InputPacking(
        [
            PackedField("num_seqs"),
            PackedField("slots", rows, fill=-1),
            PackedField("backs", rows, fill=-1),
            PackedField("ends", rows),
        ]
    )


@functools.cache
def draft_packing(size: int, pages: int) -> InputPacking:
    """Return the layout of the input of a program that makes drafts for `size` rows, with at most `pages` new pages."""
    return InputPacking(
        [
            PackedField("num_seqs"),
            PackedField("num_steps"),
            PackedField("slots", size, fill=-1),
            PackedField("counts", size),
            PackedField("page_slots", pages, fill=-1),
            PackedField("page_columns", pages),
            PackedField("page_ids", pages),
        ]
    )


def _packing(capacity: Capacity, key: ProgramKey) -> InputPacking:
    size = key.size
    if key.kind == "draft_read":
        return read_packing(size, min(capacity.num_slots, size))
    return draft_packing(size, size * -(-(1 + capacity.max_drafts) // capacity.page_size))


def pack_reads(reads: list[DraftRead], capacity: Capacity) -> tuple[ProgramKey, np.ndarray]:
    """Return the program that reads tokens, and its input `[ranks, size]`."""
    by_rank: list[list[DraftRead]] = [[] for _ in range(capacity.num_ranks)]
    for read in reads:
        by_rank[read.rank].append(read)
    most = max(sum(read.length for read in own) for own in by_rank)
    size = smallest_fitting(capacity.draft_read_buckets, most)
    key, rows = ProgramKey("draft_read", size), min(capacity.num_slots, size)
    packing = _packing(capacity, key)

    def pack(own: list[DraftRead]) -> np.ndarray:
        ends = np.cumsum([0, *(read.length for read in own)])[1:].tolist()
        ends += (ends[-1:] or [0]) * (rows - len(ends))
        slots, backs = [read.slot for read in own], [read.back for read in own]
        return packing.pack({"num_seqs": [len(own)], "slots": slots, "backs": backs, "ends": ends})

    return key, np.stack([pack(own) for own in by_rank])


def pack_drafts(plan: StepPlan, capacity: Capacity) -> tuple[ProgramKey, np.ndarray]:
    """Return the program that makes the drafts that a plan verifies, and its input `[ranks, size]`."""
    by_rank: list[list[Chunk]] = [[] for _ in range(capacity.num_ranks)]
    for chunk in reversed(plan.chunks):  # the longest drafts first
        if chunk.length > 1:
            by_rank[chunk.rank].append(chunk)
    key = ProgramKey("draft", smallest_fitting(capacity.draft_buckets, max(map(len, by_rank))))
    packing, page_size = _packing(capacity, key), capacity.page_size

    def pack(own: list[Chunk]) -> np.ndarray:
        fields: dict[str, list[int]] = {"page_slots": [], "page_columns": [], "page_ids": []}
        for chunk in own:
            pages, first = chunk.new_pages[0], -(-chunk.start // page_size)
            fields["page_slots"] += [chunk.slot] * len(pages)
            fields["page_columns"] += range(first, first + len(pages))
            fields["page_ids"] += pages
        fields |= {"slots": [chunk.slot for chunk in own], "counts": [chunk.length - 1 for chunk in own]}
        return packing.pack({"num_seqs": [len(own)], "num_steps": [plan.draft_steps], **fields})

    return key, np.stack([pack(own) for own in by_rank])


def _make(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    drafter, packing = context.drafter, _packing(capacity, key)
    assert isinstance(drafter, DraftModel)
    run = _draft if key.kind == "draft" else _read

    def draft(params: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, Any]:
        state = run(_DraftingModel(context, drafter, *params), state, packing.unpack(packed), key.size)
        return state, feedback_of(state, context.model) or ()

    return draft


def _output(shapes: Shapes, key: ProgramKey) -> Any:
    return partitions(feedback_of(shapes.state, shapes.context.model)) or ()


DRAFT = ProgramKind(
    name="draft",
    keys=lambda capacity: [ProgramKey("draft", size) for size in capacity.draft_buckets],
    make=_make,
    packing=_packing,
    output=_output,
    where_drawn=True,
)
DRAFT_READ = ProgramKind(
    name="draft_read",
    keys=lambda capacity: [ProgramKey("draft_read", size) for size in capacity.draft_read_buckets],
    make=_make,
    packing=_packing,
    output=_output,
    compiles_long=True,
    where_drawn=True,
)


@dataclasses.dataclass(frozen=True)
class _DraftingModel:
    """The draft model or head, with its weights (`own`), and the weights of the model that it drafts for."""

    context: StepContext
    drafter: DraftModel
    of_target: Any
    own: Any

    def batch(
        self,
        state: DeviceState,
        slots: Int[Array, " rows"],
        first: Int[Array, " rows"],
        starts: Int[Array, " rows_plus_1"],
        size: int,
        num_seqs: Int[Array, ""],
    ) -> tuple[TokenBatch, Array | None]:
        """Return rows of tokens of the sequences' history, row r from position `first[r]` on, and features for a head.

        A head gets each token one position early: at the position of the token whose features it gets.
        """
        drafts = state.drafts
        assert drafts is not None
        assert drafts.history is not None
        token = jnp.arange(size, dtype=jnp.int32)
        row = jnp.searchsorted(starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, len(slots) - 1)
        positions = jnp.where(token < starts[-1], first[row] + token - starts[row], 0)
        fill_lens = state.sampling.ints[slots, SlotColumn.FILL_LEN]
        tables = state.page_tables[0][slots]
        is_head = self.drafter.is_head
        batch = TokenBatch(
            tokens=drafts.history.at[slots[row], positions + is_head].get(mode="clip"),
            positions=positions,
            fill_lens=fill_lens[row],
            page_tables=(tables,),
            query_starts=starts,
            kv_lens=jnp.where(starts[1:] > starts[:-1], first + starts[1:] - starts[:-1], 0),
            num_decodes=jnp.zeros_like(num_seqs),
            num_seqs=num_seqs,
        )
        return batch, kept_features(drafts, tables, row, positions) if is_head else None

    def forward(
        self, batch: TokenBatch, features: Array | None, kv: PagedKV
    ) -> tuple[Float[Array, "tokens dim"], PagedKV]:
        """Return the hidden states of tokens, which are the features that a head computes, and the updated cache."""
        model, context = self.drafter.model, self.context
        module = family(model)
        if features is None:
            x = module.embed(model, self.own, batch)
            out = forward(model, self.own, x, batch, (kv,), context.backend)
        else:
            embedded = family(context.model).embed(context.model, self.of_target, batch)
            out = module.forward(model, self.own, embedded, features, batch, (kv,), context.backend)
        return out.hidden, paged_pool(out.kv, 0)

    def logits(
        self, hidden: Float[Array, "rows dim"], num_rows: Int[Array, ""] | None
    ) -> Float[Array, "rows vocab_shard"]:
        """Return the logits of hidden states: of the first `num_rows` only, if it is given."""
        model = self.drafter.model
        if not self.drafter.is_head:
            found: Array = family(model).head(model, self.own, hidden, num_rows)
        else:
            of_target = functools.partial(family(self.context.model).head, self.context.model, self.of_target)
            found = family(model).logits(model, self.own, hidden, of_target, num_rows)
        return found


def _read(model: _DraftingModel, state: DeviceState, fields: dict[str, Array], size: int) -> DeviceState:
    """Compute tokens of sequences: row r begins `backs[r]` tokens before the last one, or with the first token.

    The host counts drafts in flight as accepted, so `backs` can exceed the length of a short sequence.
    """
    slots, ends = jnp.maximum(fields["slots"], 0), fields["ends"]
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    live = jnp.arange(len(slots), dtype=jnp.int32) < fields["num_seqs"]
    first = jnp.where(live, jnp.maximum(state.seq_lens[slots] - fields["backs"], 0), 0)
    batch, features = model.batch(state, slots, first, starts, size, fields["num_seqs"])
    _, kv = model.forward(batch, features, state.drafts.kv)  # type: ignore[union-attr, arg-type]
    return _with_drafts(state, kv=kv)


def _draft(model: _DraftingModel, state: DeviceState, fields: dict[str, Array], size: int) -> DeviceState:
    """Make drafts of `counts` tokens. Longer drafts come first, so the rows that still draft are always the first."""
    drafts, context = state.drafts, model.context
    assert drafts is not None
    assert drafts.kv is not None
    num_slots, most = state.seq_lens.shape[0], drafts.tokens.shape[1]
    at = jnp.where(fields["page_slots"] < 0, num_slots, fields["page_slots"])
    table = state.page_tables[0].at[at, fields["page_columns"]].set(fields["page_ids"], mode="drop")
    state = dataclasses.replace(state, page_tables=(table, *state.page_tables[1:]))
    slots, num_seqs = jnp.maximum(fields["slots"], 0), fields["num_seqs"]
    row = jnp.arange(size, dtype=jnp.int32)
    live = row < num_seqs
    lengths = jnp.where(live, state.seq_lens[slots], 0)
    counts, ends = fields["counts"], jnp.arange(size + 1, dtype=jnp.int32)

    def draw(hidden: Float[Array, "rows dim"], found: Int[Array, "rows most"], ahead: Array) -> Array:
        """Return the drafts with another token, `ahead` tokens after the last one of the sequence."""
        rows = DrawnRows(slots, lengths + 1 + ahead, live, jnp.where(jnp.arange(most) < ahead, found, -1))
        tokens, _ = sample_rows(model.logits, hidden, rows, num_seqs, state, context, greedy=False)
        return lax.dynamic_update_slice_in_dim(found, tokens[:, None], ahead, axis=1)

    # A model computes the last token at the end of its sequence, a head at the position before.
    most_again, end = model.drafter.last, lengths - model.drafter.is_head
    again = jnp.where(live, jnp.minimum(end + 1, most_again), 0)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(again)])
    batch, features = model.batch(state, slots, end + 1 - again, starts, size * most_again, num_seqs)
    hidden, kv = model.forward(dataclasses.replace(batch, max_queries=most_again), features, drafts.kv)
    hidden = hidden[jnp.maximum(starts[1:] - 1, 0)]
    found = draw(hidden, jnp.zeros((size, most), jnp.int32), jnp.int32(0))

    def body(ahead: Array, carried: tuple[PagedKV, Array, Array]) -> tuple[PagedKV, Array, Array]:
        kv, found, hidden = carried
        drafting = jnp.sum((counts > ahead).astype(jnp.int32))
        step, features = model.batch(state, slots, end + ahead, jnp.minimum(ends, drafting), size, drafting)
        token = lax.dynamic_index_in_dim(found, ahead - 1, axis=1, keepdims=False)
        step = dataclasses.replace(step, tokens=token, num_decodes=drafting, decode_only=True)
        hidden, kv = model.forward(step, None if features is None else hidden, kv)
        return kv, draw(hidden, found, ahead), hidden

    if row_kernels(context.backend.target) is not None:
        # The loop is unrolled, so that the program stays one graph.
        for ahead in range(1, most):
            kv, found, hidden = body(jnp.int32(ahead), (kv, found, hidden))
    else:
        kv, found, _ = lax.fori_loop(1, fields["num_steps"], body, (kv, found, hidden))
    drafted = jnp.where(live, slots, num_slots)
    tokens = drafts.tokens.at[drafted].set(found, mode="drop")
    return _with_drafts(state, kv=kv, tokens=tokens, counts=drafts.counts.at[drafted].set(counts, mode="drop"))


def _with_drafts(state: DeviceState, **changes: Any) -> DeviceState:
    assert state.drafts is not None
    return dataclasses.replace(state, drafts=dataclasses.replace(state.drafts, **changes))
