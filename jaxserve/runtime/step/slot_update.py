"""The programs that open slots, before the first step of their requests.

`update` sets up to `SLOTS` slots of a rank and the pages that they share with the prefix cache. `adjust` follows for
requests with penalties or a logit bias, and sets what `adjust_logits` reads. `read_prompts` follows with speculation,
and sets the tokens of which drafts are made. Their inputs have a fixed size: more slots, pages, tokens or biases take
more calls. Slot -1 is padding.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.api_types import MAX_STOP_IDS
from jaxserve.layers.vocabulary import shard_index
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, StepContext
from jaxserve.runtime.step.state import INT_COLUMNS, DeviceState, SlotColumn
from jaxserve.runtime.step.verify import read_tokens
from jaxserve.step_plan import Capacity, SlotOpen
from pallas_kernels.sampling.parameters import COUNT_MASK, SEEN_IN_PROMPT, FloatColumn, IntColumn

# The sizes of one call for a rank. A step rarely starts more than 16 requests, and the input of `update` stays near
# 5 KB. On a CPU, padding costs time: 25 us for each penalized slot, 10 us for 500 tokens. On a TPU, XLA copies all
# counts for a scatter of 1,024 tokens, but not for one of 512.
SLOTS = 16
PAGES = 256
PENALIZED_SLOTS = 2
TOKENS = 512
BIASES = 64

_LARGEST_INT = np.iinfo(np.int32).max
_SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)

ADJUST = InputPacking(
    [
        PackedField("penalized_slots", PENALIZED_SLOTS, fill=-1),
        PackedField("count_slots", TOKENS, fill=-1),
        PackedField("count_ids", TOKENS),
        PackedField("counts", TOKENS),
        PackedField("bias_slots", BIASES, fill=-1),
        PackedField("bias_columns", BIASES),
        PackedField("bias_ids", BIASES),
        PackedField("bias_values", BIASES, is_float=True),
    ]
)

READ_PROMPTS = InputPacking(
    [
        PackedField("slots", SLOTS, fill=-1),
        PackedField("lengths", SLOTS),
        PackedField("namespaces", SLOTS),
        PackedField("token_slots", TOKENS, fill=-1),
        PackedField("positions", TOKENS),
        PackedField("tokens", TOKENS),
    ]
)

_Fields = dict[str, list[Any]]


@functools.cache
def update_packing(groups: int, *, states: bool = False) -> InputPacking:
    """Return the layout of the input of `update` for a number of KV groups, in a model with or without `states`."""
    return InputPacking(
        [
            PackedField("slots", SLOTS, fill=-1),
            PackedField("seq_lens", SLOTS),
            *([PackedField("state_rows", SLOTS)] if states else []),
            PackedField("ints", SLOTS * len(INT_COLUMNS)),
            PackedField("floats", SLOTS * len(FloatColumn), is_float=True),
            PackedField("stop_ids", SLOTS * MAX_STOP_IDS),
            *itertools.chain.from_iterable(map(_page_fields, range(groups))),
        ]
    )


def _page_fields(group: int) -> list[PackedField]:
    """Return the fields of a group's cached pages."""
    return [
        PackedField(f"page_slots_{group}", PAGES, fill=-1),
        PackedField(f"page_columns_{group}", PAGES),
        PackedField(f"page_ids_{group}", PAGES),
    ]


def sampling_row(opened: SlotOpen) -> dict[str, list[Any]]:
    """Return the rows of `SamplingRows` that `update` sets for a slot: all but the logit bias, which it removes."""
    sampling = opened.sampling
    assert sampling.seed is not None
    seed = sampling.seed & (2**64 - 1)
    computed: dict[int, int] = {
        IntColumn.SEED_LOW: _signed(seed & 0xFFFFFFFF),
        IntColumn.SEED_HIGH: _signed(seed >> 32),
        IntColumn.SAMPLE: opened.sample,
        # The host holds back stop ids where a grammar constrains what is drawn.
        IntColumn.MIN_LEN: (
            0 if opened.constrained else min(len(opened.prompt_ids) + sampling.min_tokens, _LARGEST_INT)
        ),
        IntColumn.LOGPROBS: int(sampling.logprobs is not None),
        SlotColumn.FILL_LEN: len(opened.prompt_ids) + len(opened.output_ids),
        SlotColumn.CONSTRAINED: int(opened.constrained),
    }

    def option(column: IntColumn | FloatColumn | SlotColumn) -> Any:
        return getattr(sampling, column.name.lower())

    return {
        # An option below 0 is off, as it is at 0.
        "ints": [computed[column] if column in computed else max(option(column), 0) for column in INT_COLUMNS],
        "floats": [_normal(option(column)) for column in FloatColumn],
        "stop_ids": [*opened.stop_ids, *[-1] * (MAX_STOP_IDS - len(opened.stop_ids))],
    }


def _normal(value: float) -> float:
    """Return a number, or 0 if it is subnormal in float32: only some operations of a device would take it for 0."""
    return 0.0 if abs(value) < _SMALLEST_FLOAT else value


def pack_updates(opens: Sequence[SlotOpen], capacity: Capacity) -> Iterator[np.ndarray]:
    """Yield the packed inputs of the calls of `update` that open slots of one rank."""
    groups, states = len(capacity.pages_by_group), capacity.num_states > 0
    for some in itertools.batched(opens, SLOTS):
        rows: _Fields = {"slots": [one.slot for one in some], "seq_lens": [one.num_cached_tokens for one in some]}
        if states:
            rows["state_rows"] = [one.state or 0 for one in some]
        for row in map(sampling_row, some):
            _extend(rows, row)
        pages: list[_Fields] = [{} for _ in range(groups)]
        for one in some:
            # Without a state at its end, the first group has pages of tokens that are computed again.
            end = max(one.num_cached_tokens // capacity.page_size, len(one.cached_pages[0]))
            for group, ids in enumerate(one.cached_pages):
                found = [one.slot] * len(ids), range(end - len(ids), end), ids
                _extend(pages[group], dict(zip((field.name for field in _page_fields(group)), found)))
        yield from _pack(update_packing(groups, states=states), rows, *((fields, PAGES) for fields in pages))


def pack_adjustments(opens: Sequence[SlotOpen]) -> Iterator[np.ndarray]:
    """Yield the packed inputs of the calls of `adjust`, in order, that follow those of `update`."""
    adjusted = [one for one in opens if one.sampling.penalized or one.sampling.logit_bias]
    for some in itertools.batched(adjusted, PENALIZED_SLOTS):
        tokens: _Fields = {}
        biases: _Fields = {}
        for one in some:
            counts = _penalty_counts(one) if one.sampling.penalized else {}
            _extend(tokens, {"count_slots": [one.slot] * len(counts), "count_ids": counts, "counts": counts.values()})
            bias = one.sampling.logit_bias
            places: dict[str, Iterable[Any]] = {"bias_slots": [one.slot] * len(bias), "bias_columns": range(len(bias))}
            _extend(biases, {**places, "bias_ids": bias, "bias_values": bias.values()})
        penalized = [one.slot for one in some if one.sampling.penalized]
        yield from _pack(ADJUST, {"penalized_slots": penalized}, (tokens, TOKENS), (biases, BIASES))


def pack_prompts(opens: Sequence[SlotOpen]) -> Iterator[np.ndarray]:
    """Yield the packed inputs of the calls of `read_prompts`, in order, that follow those of `update`."""
    for some in itertools.batched(opens, SLOTS):
        texts = [one.prompt_ids + one.output_ids for one in some]
        slots = {
            "slots": [one.slot for one in some],
            "lengths": list(map(len, texts)),
            "namespaces": [_hash(one.namespace) for one in some],
        }
        tokens: _Fields = {"token_slots": [], "positions": [], "tokens": []}
        for one, text in zip(some, texts):
            _extend(tokens, {"token_slots": [one.slot] * len(text), "positions": range(len(text)), "tokens": text})
        yield from _pack(READ_PROMPTS, slots, (tokens, TOKENS))


def _penalty_counts(opened: SlotOpen) -> dict[int, int]:
    """Return the values of `DeviceState.counts` that aren't 0, by token."""
    counts = dict.fromkeys(opened.prompt_ids, SEEN_IN_PROMPT)
    for token, count in Counter(opened.output_ids).items():
        counts[token] = counts.get(token, 0) + min(count, COUNT_MASK)
    return counts


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), signed=True)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _extend(fields: _Fields, more: dict[str, Any]) -> None:
    for name, values in more.items():
        fields.setdefault(name, []).extend(values)


def _pack(packing: InputPacking, first: _Fields, *lists: tuple[_Fields, int]) -> Iterator[np.ndarray]:
    """Yield inputs: the first holds the fields `first`, and each at most `size` values of each `(fields, size)`."""
    calls = max(-(-len(values) // size) for fields, size in lists for values in fields.values())
    for call in range(max(calls, 1)):
        parts = {
            name: values[call * size : (call + 1) * size] for fields, size in lists for name, values in fields.items()
        }
        yield packing.pack({**parts, **(first if call == 0 else {})})


def update(_: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, tuple[()]]:
    """Set slots of one rank. Counts are left as they are: only penalized requests read them."""
    fields = update_packing(len(state.page_tables), states=state.states is not None).unpack(packed)
    slots = fields["slots"]
    rows = {name: fields[name].reshape(SLOTS, -1) for name in ("ints", "floats", "stop_ids")}
    sampling = {name: _set(getattr(state.sampling, name), (slots,), row) for name, row in rows.items()}
    state = dataclasses.replace(
        state,
        seq_lens=_set(state.seq_lens, (slots,), fields["seq_lens"]),
        page_tables=tuple(_set_pages(table, group, fields) for group, table in enumerate(state.page_tables)),
        sampling=dataclasses.replace(state.sampling, bias_ids=_set(state.sampling.bias_ids, (slots,), -1), **sampling),
    )
    if state.states is not None:
        moved = _set(state.states.rows, (slots,), fields["state_rows"])
        folded = _set(state.states.folded, (slots,), fields["seq_lens"])
        state = dataclasses.replace(state, states=dataclasses.replace(state.states, rows=moved, folded=folded))
    return state, ()


def adjust(_: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, tuple[()]]:
    """Clear the counts of penalized slots, then set counts of tokens and biases of one rank."""
    fields = ADJUST.unpack(packed)
    assert state.counts is not None
    ids = shard_index(fields["count_ids"], state.counts.shape[1])
    counts = _set(state.counts, (fields["penalized_slots"],), 0)
    biases = {
        name: _set(getattr(state.sampling, name), (fields["bias_slots"], fields["bias_columns"]), fields[name])
        for name in ("bias_ids", "bias_values")
    }
    state = dataclasses.replace(
        state,
        counts=_set(counts, (fields["count_slots"], ids), fields["counts"].astype(counts.dtype)),
        sampling=dataclasses.replace(state.sampling, **biases),
    )
    return state, ()


def _make_read_prompts(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    drafter = context.drafter
    assert drafter is not None

    def read_prompts(_: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, tuple[()]]:
        """Set the tokens of slots of one rank, and remove their drafts."""
        fields, drafts = READ_PROMPTS.unpack(packed), state.drafts
        assert drafts is not None
        at = (fields["slots"],)
        if drafts.ngrams is not None:
            ngrams = dataclasses.replace(
                drafts.ngrams,
                lengths=_set(drafts.ngrams.lengths, at, fields["lengths"]),
                namespaces=_set(drafts.ngrams.namespaces, at, fields["namespaces"]),
            )
            drafts = dataclasses.replace(drafts, ngrams=ngrams)
        drafts = read_tokens(drafts, fields["token_slots"], fields["positions"], fields["tokens"], drafter)
        drafts = dataclasses.replace(drafts, counts=_set(drafts.counts, at, 0))
        return dataclasses.replace(state, drafts=drafts), ()

    return read_prompts


UPDATE_KEY, ADJUST_KEY, READ_PROMPTS_KEY = map(ProgramKey, ("update", "adjust", "read_prompts"))
SLOT_UPDATES = (
    ProgramKind(
        name="update",
        keys=lambda capacity: [UPDATE_KEY],
        make=lambda context, capacity, key: update,
        packing=lambda capacity, key: update_packing(len(capacity.pages_by_group), states=capacity.num_states > 0),
        takes_weights=False,
    ),
    ProgramKind(
        name="adjust",
        keys=lambda capacity: [ADJUST_KEY],
        make=lambda context, capacity, key: adjust,
        packing=lambda capacity, key: ADJUST,
        takes_weights=False,
        where_drawn=True,
    ),
    ProgramKind(
        name="read_prompts",
        keys=lambda capacity: [READ_PROMPTS_KEY] if capacity.max_drafts else [],
        make=_make_read_prompts,
        packing=lambda capacity, key: READ_PROMPTS,
        takes_weights=False,
        where_drawn=True,
    ),
)


def _set_pages(table: jax.Array, group: int, fields: dict[str, jax.Array]) -> jax.Array:
    slots, columns, ids = (fields[field.name] for field in _page_fields(group))
    return _set(table, (slots, columns), ids)


def _set(array: jax.Array, at: tuple[jax.Array, ...], values: jax.Array | int) -> jax.Array:
    """Return the array with values at some indices. Indices that are negative or too large are dropped."""
    return array.at[at].set(values, mode="drop", wrap_negative_indices=False)
