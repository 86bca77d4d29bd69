"""Verification: which tokens a step computes for drafts, and how many of them are accepted.

The target draws its own token at each position of a draft, with the noise of that position, as it would have without
the draft. A draft token is accepted if it is the token drawn at its place and all before it were. So the output is
what it would have been without drafts, for every way to sample. For a draft without randomness, the probability of
acceptance is that of rejection sampling (Leviathan et al. 2023).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxserve.layers.axes import TENSOR_AXES
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.runtime.step.state import DeviceState, Drafts
from pallas_kernels import ngram_lookup
from pallas_kernels.ngram_lookup import NgramLookup


class DrawingTokens(NamedTuple):
    """The tokens of a step that draw the next one, and the row of each; `offset` counts those of its row before it.

    By row, `counts` says how many of its last tokens draw, and `starts` where these begin among all that draw.
    """

    tokens: Int[Array, " drawn"]
    rows: Int[Array, " drawn"]
    offset: Int[Array, " drawn"]
    counts: Int[Array, " rows"]
    starts: Int[Array, " rows"]


class Drawn(NamedTuple):
    """The tokens that rows drew, from `first` on, the position after their last known token: `counts` of each row.

    `proposed` and `accepted` count the draft tokens that were compared with drawn ones, and those accepted. `lengths`
    are the computed tokens of the sequences after the step.
    """

    tokens: Int[Array, "rows most"]
    counts: Int[Array, " rows"]
    proposed: Int[Array, " rows"]
    accepted: Int[Array, " rows"]
    lengths: Int[Array, " rows"]


def tokens_to_verify(
    last_tokens: Int[Array, " slots"],
    drafts: Int[Array, "slots max_drafts"],
    row_slots: Int[Array, " rows"],
    token_row: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
) -> Int[Array, " tokens"]:
    """Return the tokens to compute: the last one of a row's sequence, at `offset` 0, then its draft."""
    slots = row_slots[token_row]
    draft = drafts[slots, jnp.clip(offset - 1, 0, drafts.shape[1] - 1)]
    return jnp.where(offset == 0, last_tokens[slots], draft)


def drawing_tokens(query_starts: Int[Array, " rows_plus_1"], num_decoding: Int[Array, ""], most: int) -> DrawingTokens:
    """Return the tokens that draw: all of the first `num_decoding` rows, and the last one of each other row.

    The arrays have `most` entries; those after the last token that draws hold any token.
    """
    ends = query_starts[1:]
    queries = ends - query_starts[:-1]
    counts = jnp.where(jnp.arange(len(queries)) < num_decoding, queries, jnp.minimum(queries, 1))
    stops = jnp.cumsum(counts, dtype=jnp.int32)
    drawn = jnp.arange(most, dtype=jnp.int32)
    rows = jnp.searchsorted(stops, drawn, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.minimum(rows, len(queries) - 1)
    starts = stops - counts
    offset = drawn - starts[rows]
    return DrawingTokens(ends[rows] - counts[rows] + offset, rows, offset, counts, starts)


def drafts_before(
    state: DeviceState, slots: Int[Array, " tokens"], offset: Int[Array, " tokens"]
) -> Int[Array, "tokens max_drafts"]:
    """Return the draft tokens up to each token's position, and -1: penalties count them as if they were output."""
    assert state.drafts is not None
    drafts = state.drafts.tokens[slots]
    return jnp.where(jnp.arange(drafts.shape[1], dtype=jnp.int32) < offset[:, None], drafts, -1)


@jax.named_scope("accept")
def accept(
    drafts: Drafts,
    drawn: Int[Array, "rows most"],
    slots: Int[Array, " rows"],
    queries: Int[Array, " rows"],
    kv_lens: Int[Array, " rows"],
) -> Drawn:
    """Accept drafts as far as they equal the drawn tokens. Rows have `queries` tokens, which `kv_lens` count too.

    A row without a draft to verify compares its first draft token all the same, and accepts nothing.
    """
    slots = jnp.minimum(slots, drafts.counts.shape[0] - 1)
    verified = jnp.minimum(drafts.counts[slots], queries - 1)
    compared = jnp.where(queries == 1, jnp.minimum(drafts.counts[slots], 1), verified)
    most = min(drawn.shape[1], drafts.tokens.shape[1])
    ahead = jnp.arange(most, dtype=jnp.int32)
    same = (drafts.tokens[slots, :most] == drawn[:, :most]) & (ahead < compared[:, None])
    accepted = jnp.cumprod(same.astype(jnp.int32), axis=1).sum(axis=1)
    counts = 1 + jnp.where(queries == 1, 0, accepted)
    return Drawn(drawn, counts, compared, accepted, kv_lens - queries + counts)


def propose(
    state: DeviceState,
    drawn: Drawn,
    slots: Int[Array, " rows"],
    draws: Bool[Array, " rows"],
    drafter: NgramLookup | DraftModel,
) -> Drafts:
    """Return the drafts for the next step, after the drawn tokens of rows that draw; a draft model makes none yet."""
    assert state.drafts is not None
    ahead = jnp.arange(drawn.tokens.shape[1], dtype=jnp.int32)
    num_slots = state.drafts.counts.shape[0]
    live = draws[:, None] & (ahead < drawn.counts[:, None])
    at = jnp.where(live, slots[:, None], num_slots)
    positions = (drawn.lengths - drawn.counts + 1)[:, None] + ahead
    at, positions, known = (x.reshape(-1) for x in (at, positions, drawn.tokens))
    if isinstance(drafter, DraftModel):
        drafts = read_tokens(state.drafts, at, positions, known, drafter)
        return dataclasses.replace(drafts, counts=drafts.counts.at[slots].set(0, mode="drop"))
    drafts = state.drafts
    assert drafts.ngrams is not None
    slots = jnp.where(draws, slots, num_slots)
    ngrams, tokens, counts = ngram_lookup.propose(
        drafts.ngrams, drafts.tokens, drafts.counts, at, positions, known, slots, drafter
    )
    if lax.axis_size(TENSOR_AXES) > 1:
        # If two n-grams of a step share an entry, each shard may have stored another of them.
        tokens, counts = lax.pmax((tokens, counts), TENSOR_AXES)
    return dataclasses.replace(drafts, tokens=tokens, counts=counts, ngrams=ngrams)


def read_tokens(
    drafts: Drafts,
    slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tokens: Int[Array, " tokens"],
    drafter: NgramLookup | DraftModel,
) -> Drafts:
    """Add tokens to the data that drafts are made from. Invalid slots are dropped."""
    if isinstance(drafter, DraftModel):
        assert drafts.history is not None
        history = drafts.history.at[slots, positions].set(tokens, mode="drop", wrap_negative_indices=False)
        return dataclasses.replace(drafts, history=history)
    assert drafts.ngrams is not None
    return dataclasses.replace(drafts, ngrams=ngram_lookup.remember(drafts.ngrams, slots, positions, tokens, drafter))
