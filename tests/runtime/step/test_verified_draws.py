"""Tokens that verification yields have the distribution of the model and the sampler, whatever was drafted.

The model's logits depend on the last token alone, so that the exact distribution of each next token is known. All rows
are one request with another seed each. In a mixed step, further rows compute it again, as after a retraction. Seeds are
fixed, so that each run of the tests finds the same.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtri

from jaxserve.api_types import MAX_LOGIT_BIAS
from jaxserve.layers.batch import TokenBatch
from jaxserve.runtime.step import step, verify
from jaxserve.runtime.step.batch import StepInput, StepShape
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.sampling import DrawnRows
from jaxserve.runtime.step.slot_update import sampling_row
from jaxserve.runtime.step.state import DeviceState, Drafts, SamplingRows
from jaxserve.runtime.step.verify import DrawingTokens, Drawn
from jaxserve.step_plan import SlotOpen
from pallas_kernels.paged_attention import KernelTarget
from pallas_kernels.sampling.parameters import SEEN_IN_PROMPT, IntColumn
from tests.runtime import plain_sampling
from tests.runtime.tiny import on_mesh, opening
from tests.selection import grid

pytestmark = pytest.mark.slow

VOCAB, ROWS, MOST = 12, 4096, 2
COMPUTED_AGAIN = 2048
PROMPT, LAST = [1, 2], 0
TABLE = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.7, "temperature": 1.5},
    "bias": {"logit_bias": {3: 2.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 2, "stop_ids": (4, 7), "temperature": 1.5},
}


def _draw(params: Any, state: DeviceState, inputs: StepInput) -> Drawn:
    model: Any = SimpleNamespace(head=lambda _, table, hidden, __: table[hidden[:, 0].astype(jnp.int32)])
    config, backend = SimpleNamespace(vocab_size=VOCAB), SimpleNamespace(target=KernelTarget("cpu"))
    context: Any = SimpleNamespace(model=SimpleNamespace(config=config), backend=backend, sample_rows=None)
    num_tokens, rows = inputs.batch.num_tokens, len(inputs.slots)
    mixed = rows > ROWS
    shape = StepShape(
        ProgramKey("mixed" if mixed else "verify", num_tokens, greedy=False),
        tokens=num_tokens,
        rows=rows,
        pages=1,
        groups=1,
        drawn=ROWS * (1 + MOST) + rows - ROWS + 5 * mixed,
        max_drafts=MOST,
    )
    offset = jnp.arange(num_tokens) - inputs.batch.query_starts[inputs.token_row]
    tokens = verify.tokens_to_verify(state.last_tokens, state.drafts.tokens, inputs.slots, inputs.token_row, offset)
    tokens = jnp.where(inputs.token_row < inputs.num_decoding, tokens, inputs.batch.tokens)
    hidden = tokens.astype(jnp.float32)[:, None]
    drawn, _ = step._draw(model, params, hidden, inputs, state, context, shape)
    return drawn


def _inputs(kind: str) -> StepInput:
    """Return the input of a step that verifies `MOST` draft tokens of `ROWS` rows; a mixed one has more rows."""
    queries = np.full(ROWS, 1 + MOST, np.int32)
    starts = np.full(ROWS, len(PROMPT), np.int32)
    if kind == "mixed":
        queries = np.append(queries, np.full(COMPUTED_AGAIN, len(PROMPT) + 1, np.int32))
        starts = np.append(starts, np.zeros(COMPUTED_AGAIN, np.int32))
    row = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
    ends = np.cumsum(queries, dtype=np.int32)
    place = np.arange(len(row), dtype=np.int32) - (ends - queries)[row]
    batch = TokenBatch(
        tokens=jnp.asarray(np.array([*PROMPT, LAST], np.int32)[place]),
        positions=jnp.asarray(starts[row] + place),
        fill_lens=jnp.zeros(len(row), jnp.int32),
        page_tables=(),
        query_starts=jnp.asarray(np.append(np.int32(0), ends)),
        kv_lens=jnp.asarray(starts + queries),
        num_decodes=jnp.int32(0),
        num_seqs=jnp.int32(len(queries)),
        max_queries=1 + MOST if kind == "verify" else None,
    )
    slots = jnp.arange(len(queries), dtype=jnp.int32)
    return StepInput(batch, slots, jnp.ones(len(queries), bool), jnp.int32(ROWS), None, jnp.asarray(row))


def _state(opened: SlotOpen, drafts: np.ndarray) -> DeviceState:
    """Return the state of slots of the same request, each with another seed; the first ones have drafts."""
    slots = ROWS + COMPUTED_AGAIN
    drafts = np.pad(drafts, ((0, COMPUTED_AGAIN), (0, 0)))
    row = sampling_row(opened)
    ints = np.tile(np.array(row["ints"], np.int32), (slots, 1))
    ints[:, IntColumn.SEED_LOW] = np.arange(slots)
    bias_ids, bias_values = np.full(MAX_LOGIT_BIAS, -1, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias = opened.sampling.logit_bias
    bias_ids[: len(bias)], bias_values[: len(bias)] = list(bias), list(bias.values())
    counts = np.zeros(VOCAB, np.int16)
    counts[opened.output_ids] += 1
    counts[opened.prompt_ids] |= SEEN_IN_PROMPT

    def each(values: Any, dtype: Any) -> Any:
        return jnp.asarray(np.tile(np.asarray(values, dtype), (slots, 1)))

    return DeviceState(
        kv=(),
        last_tokens=jnp.full(slots, LAST, jnp.int32),
        seq_lens=jnp.full(slots, len(PROMPT), jnp.int32),
        page_tables=(),
        sampling=SamplingRows(
            ints=jnp.asarray(ints),
            floats=each(row["floats"], np.float32),
            stop_ids=each(row["stop_ids"], np.int32),
            bias_ids=each(bias_ids, np.int32),
            bias_values=each(bias_values, np.float32),
        ),
        counts=each(counts, np.int16),
        hidden=jnp.zeros((slots, VOCAB)),
        expert_tokens=None,
        drafts=Drafts(jnp.asarray(drafts, jnp.int32), jnp.full(slots, MOST, jnp.int32), None),
    )


def _opened(name: str) -> SlotOpen:
    return opening(prompt=PROMPT, outputs=[LAST], **OPTIONS[name])


def _drafts(kind: str, opened: SlotOpen, drawing: Any) -> np.ndarray:
    """Return the drafts `[ROWS, MOST]` of a kind; right ones are what the model draws."""
    if kind == "random":
        return np.random.default_rng(5).integers(VOCAB, size=(ROWS, MOST))
    if kind == "right":
        drafts = np.zeros((ROWS, MOST), np.int64)
        for place in range(MOST):
            drafts[:, place] = drawing(TABLE, _state(opened, drafts), _inputs("verify")).tokens[:, place]
        return drafts
    exact = plain_sampling.probabilities(TABLE[LAST], opened)
    return np.full((ROWS, MOST), np.argmax(exact) if kind == "likeliest" else np.argmin(exact))


def _is_likely(found: np.ndarray, exact: np.ndarray) -> bool:
    """Return whether tokens are distributed so, but for one case in 10,000."""
    wanted, seen = exact * len(found), np.bincount(found, minlength=VOCAB).astype(np.float64)
    if seen[exact == 0].any():
        return False
    often = wanted >= 5
    wanted, seen = (np.append(x[often], x[~often].sum()) for x in (wanted, seen))
    wanted, seen = wanted[wanted > 0], seen[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return bool(statistic < chdtri(max(1, len(wanted) - 1), 1e-4))


def _follow_the_model(drawn: Drawn, name: str) -> bool:
    """Return whether the first tokens of rows, and the second ones after each first one, are distributed as they are
    without drafts."""
    tokens, counts = np.asarray(drawn.tokens), np.asarray(drawn.counts)
    exact = plain_sampling.probabilities(TABLE[LAST], _opened(name))
    fine = all(_is_likely(rows[:, 0], exact) for rows in (tokens[:ROWS], tokens[ROWS:]) if len(rows))
    for first in range(VOCAB):
        second = tokens[(tokens[:, 0] == first) & (counts >= 2), 1]
        after = opening(prompt=PROMPT, outputs=[LAST, first], **OPTIONS[name])
        fine &= len(second) < 50 or _is_likely(second, plain_sampling.probabilities(TABLE[first], after))
    return fine


@pytest.fixture(scope="module")
def drawing() -> Any:
    return on_mesh(_draw)


KINDS = ("right", "random", "likeliest", "least likely")
CASES = itertools.product(OPTIONS, KINDS, ("verify", "mixed"))


@pytest.mark.parametrize(
    ("name", "kind", "step_kind"), grid(CASES, lambda case: case[1] == "random" or case[0] in ("penalties", "min_p"))
)
def test_drafts_leave_the_distribution_as_it_is(drawing: Any, name: str, kind: str, step_kind: str) -> None:
    opened = _opened(name)
    drafts = _drafts(kind, opened, drawing)
    drawn = drawing(TABLE, _state(opened, drafts), _inputs(step_kind))
    assert _follow_the_model(drawn, name)
    assert (drawn.counts[ROWS:] == 1).all()
    if kind == "right":
        np.testing.assert_array_equal(drawn.counts[:ROWS], 1 + MOST)
    if kind == "likeliest":
        expected = plain_sampling.probabilities(TABLE[LAST], opened).max()
        assert np.mean(np.asarray(drawn.accepted[:ROWS]) >= 1) == pytest.approx(expected, abs=0.03)


def _accept_one_more(*arguments: Any) -> Drawn:
    drawn = _accept(*arguments)
    return drawn._replace(counts=jnp.minimum(drawn.counts + 1, 1 + MOST))


def _noise_of_one_position(slots: Any, lengths: Any, *others: Any) -> DrawnRows:
    return DrawnRows(slots, jnp.full_like(lengths, len(PROMPT) + 1), *others)


def _without_drafts_before(*arguments: Any) -> Any:
    return jnp.full_like(_drafts_before(*arguments), -1)


def _first_token_of_prompts(query_starts: Any, num_decoding: Any, most: int) -> DrawingTokens:
    drawing = _drawing_tokens(query_starts, num_decoding, most)
    first = query_starts[drawing.rows]
    return drawing._replace(tokens=jnp.where(drawing.rows < num_decoding, drawing.tokens, first))


_accept, _drafts_before, _drawing_tokens = verify.accept, verify.drafts_before, verify.drawing_tokens


@pytest.mark.parametrize(
    ("module", "function", "bug", "name", "kind"),
    [
        (verify, "accept", _accept_one_more, "temperature", "random"),
        (step, "DrawnRows", _noise_of_one_position, "temperature", "likeliest"),
        (verify, "drafts_before", _without_drafts_before, "penalties", "likeliest"),
        (verify, "drawing_tokens", _first_token_of_prompts, "temperature", "likeliest"),
    ],
)
def test_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, function: str, bug: Any, name: str, kind: str
) -> None:
    monkeypatch.setattr(module, function, bug)
    opened, wrong = _opened(name), on_mesh(lambda *arguments: _draw(*arguments))
    drawn = wrong(TABLE, _state(opened, _drafts(kind, opened, wrong)), _inputs("mixed"))
    assert not _follow_the_model(drawn, name)
