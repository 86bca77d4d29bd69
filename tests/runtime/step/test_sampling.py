"""Compares the sampler with plain numpy: which tokens may be drawn, exactly, and how often, within chance.

Other rows of the batch must not influence a row. Draws of one row at many positions are one call, as randomness depends
on seed and position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from scipy.special import chdtri

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.runtime.step import sampling
from jaxserve.runtime.step.sampling import DrawnRows, Logprobs
from jaxserve.runtime.step.slot_update import sampling_row
from jaxserve.runtime.step.state import SamplingRows
from jaxserve.step_plan import SlotOpen
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import KernelTarget
from pallas_kernels.sampling import row_kernels
from pallas_kernels.sampling.parameters import SEEN_IN_PROMPT, IntColumn
from tests.extremes import extremes
from tests.runtime import plain_sampling
from tests.runtime.tiny import on_mesh, opening

pytestmark = pytest.mark.slow

VOCAB = 600  # no multiple of the blocks that the kernel goes through
DRAWS = 4096
CPU = KernelTarget("cpu")
INTERPRETED_GPU = KernelTarget("cpu", capability=(9, 0))


def sample_all(
    logits: Any, params: SamplingRows, counts: Any, lengths: Any, allowed: Any = None, target: KernelTarget = CPU
) -> tuple[Any, Logprobs]:
    """Return a token of each slot, and its log probabilities."""
    rows = DrawnRows(jnp.arange(len(logits)), lengths, jnp.ones(len(logits), bool), allowed=allowed)
    return sampling.sample(logits, params, counts, rows, target)


def _sample_first_rows(logits: Any, params: SamplingRows, counts: Any, lengths: Any, num_rows: Any) -> Any:
    """Return a token of each of the first `num_rows` slots, and its log probabilities."""
    row = jnp.arange(len(logits))
    return sampling.sample(logits, params, counts, DrawnRows(row, lengths, row < num_rows), CPU, num_rows)


def sample_all_by_triton(*arguments: Any) -> Any:
    """Compute `sample_all` as on an NVIDIA GPU, with interpreted kernels."""
    return sample_all(*arguments, target=INTERPRETED_GPU)


def _sample_all_by_xla(*arguments: Any) -> Any:
    """Compute `sample_all` as on devices that we have no kernels for."""

    with mock.patch.object(dispatch, "on_cpu", lambda _, otherwise, *operands: otherwise(*operands)):
        return sample_all(*arguments)


def _adjusted(logits: Any, params: SamplingRows, counts: Any, lengths: Any) -> Any:
    return sampling.adjust_logits(logits, params, counts, DrawnRows(jnp.arange(len(logits)), lengths, None))


_sample = on_mesh(sample_all)
_sample_first = on_mesh(_sample_first_rows)
_sample_by_xla = on_mesh(_sample_all_by_xla)
_sample_by_triton = on_mesh(sample_all_by_triton)
_adjust = on_mesh(_adjusted)
_greedy = on_mesh(sampling.greedy)
_logprobs = on_mesh(lambda logits, token: sampling.logprobs(logits, token, CPU))


def _rows(opened: list[SlotOpen]) -> tuple[SamplingRows, np.ndarray, np.ndarray]:
    """Return the sampling rows, counts and lengths of slots, as `update` and `adjust` would set them."""
    rows = [sampling_row(one) for one in opened]
    bias_ids = np.full((len(opened), MAX_LOGIT_BIAS), -1, np.int32)
    bias_values = np.zeros((len(opened), MAX_LOGIT_BIAS), np.float32)
    for row, one in enumerate(opened):
        bias = one.sampling.logit_bias
        bias_ids[row, : len(bias)], bias_values[row, : len(bias)] = list(bias), list(bias.values())
    counts = np.zeros((len(opened), VOCAB), np.int16)
    for row, one in enumerate(opened):
        np.add.at(counts[row], one.output_ids, 1)
        counts[row, one.prompt_ids] |= SEEN_IN_PROMPT
    lengths = np.array([len(one.prompt_ids) + len(one.output_ids) for one in opened], np.int32)
    return (
        SamplingRows(
            ints=np.array([row["ints"] for row in rows], np.int32),
            floats=np.array([row["floats"] for row in rows], np.float32),
            stop_ids=np.array([row["stop_ids"] for row in rows], np.int32),
            bias_ids=bias_ids,
            bias_values=bias_values,
        ),
        counts,
        lengths,
    )


def _batch(logits: np.ndarray, opened: list[SlotOpen]) -> tuple[np.ndarray, Logprobs]:
    token, logprobs = _sample(logits, *_rows(opened))
    return np.asarray(token), logprobs


def _draws(logits: np.ndarray, opened: SlotOpen, sample: Callable[..., Any] = _sample) -> np.ndarray:
    """Return how often each token is drawn over `DRAWS` positions."""
    rows, counts, lengths = _rows([opened])
    many = SamplingRows(*(np.repeat(getattr(rows, name), DRAWS, axis=0) for name in rows.__dataclass_fields__))
    # min_len moves with the position, so that each draw is equally early in its sequence.
    shift = np.arange(DRAWS, dtype=np.int32)
    many.ints[:, IntColumn.MIN_LEN] += shift
    token, _ = sample(np.tile(logits, (DRAWS, 1)), many, np.repeat(counts, DRAWS, axis=0), lengths + shift)
    return np.bincount(np.asarray(token), minlength=VOCAB)


def _check_draws(logits: np.ndarray, opened: SlotOpen, sample: Callable[..., Any]) -> np.ndarray:
    """Check that no forbidden token is drawn, no likely one is missing, and frequencies match the distribution."""
    expected = plain_sampling.probabilities(logits, opened) * DRAWS
    found = _draws(logits, opened, sample)
    assert not found[expected == 0].any(), np.flatnonzero((expected == 0) & (found > 0))
    assert found[expected > 20].all()
    common = expected >= 5
    pairs = [(expected[common], found[common])]
    if expected[~common].sum() >= 5:
        pairs.append((expected[~common].sum(keepdims=True), found[~common].sum(keepdims=True)))
    statistic = sum(float(((seen - wanted) ** 2 / wanted).sum()) for wanted, seen in pairs)
    cells = sum(len(wanted) for wanted, _ in pairs)
    assert statistic < chdtri(max(cells - 1, 1), 1e-5), (statistic, cells)
    return np.flatnonzero(expected)


@pytest.fixture
def logits() -> np.ndarray:
    """A few dozen likely tokens scattered over a long tail."""
    rng = np.random.default_rng(7)
    logits = rng.normal(-2.0, 1.0, VOCAB)
    logits[rng.permutation(VOCAB)[:30]] += rng.uniform(2.0, 6.0, 30)
    return logits.astype(np.float32)


def test_greedy_takes_the_likeliest_token_and_of_equals_the_lowest_id() -> None:
    logits = np.random.default_rng(0).normal(size=(5, VOCAB)).astype(np.float32)
    logits[1, [7, 300, 599]] = 50.0
    logits[2] = 0.0
    logits[3] = -np.inf
    logits[3, 599] = -1e30
    expected = logits.argmax(axis=1)
    assert expected[1:4].tolist() == [7, 0, 599]
    np.testing.assert_array_equal(_greedy(logits), expected)
    np.testing.assert_array_equal(_batch(logits, [opening(temperature=0.0)] * 5)[0], expected)


def test_adjusted_logits_are_exact() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0.0, 5.0, (8, VOCAB)).astype(np.float32)
    shapes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7, "frequency_penalty": 1.1},
        {"frequency_penalty": -2.0, "presence_penalty": 0.5},
        {"presence_penalty": -1.0},
        {"logit_bias": {token: float(token % 7) - 3 for token in range(0, VOCAB, 2)}},
        {"min_tokens": 100, "logit_bias": {7: 5.0}},
        {"min_tokens": 50, "repetition_penalty": 3.0, "presence_penalty": 1.0, "logit_bias": {599: -100.0}},
    ]
    opened = [
        opening(
            0,
            rng.integers(0, VOCAB, 80).tolist(),
            rng.integers(0, VOCAB, 60).tolist(),
            stop_ids=(0, 7, 599),
            max_tokens=200,
            **shape,
        )
        for shape in shapes
    ]
    expected = [plain_sampling.adjusted(row, one) for row, one in zip(logits, opened)]
    np.testing.assert_allclose(_adjust(logits, *_rows(opened)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 12},
        {"top_k": 10**6},
        {"top_p": 0.6},
        {"top_p": 0.95, "temperature": 1.5},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
        {"repetition_penalty": 1.8, "temperature": 1.5},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -0.5, "presence_penalty": 2.0, "top_k": 30},
        {"logit_bias": {0: 8.0, 599: 7.0, 300: -100.0}},
        {"min_tokens": 12, "top_k": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(_sample, id="kernel"),
        pytest.param(_sample_by_xla, id="xla"),
        pytest.param(_sample_by_triton, id="triton", marks=[pytest.mark.grid, pytest.mark.interpreted]),
    ],
)
def test_draws_follow_the_distribution(logits: np.ndarray, sample: Callable[..., Any], options: dict[str, Any]) -> None:
    best = np.argsort(-logits)
    opened = opening(
        0,
        prompt=best[[0, 2, 100, 101]].tolist(),
        outputs=best[[1, 1, 1, 2, 3, 200]].tolist(),
        stop_ids=(int(best[0]), int(best[5]), 599),
        **{"seed": 11, "max_tokens": 50} | options,
    )
    allowed = _check_draws(logits, opened, sample)
    if options.get("top_k", 0) in range(1, VOCAB) and "top_p" not in options:
        assert len(allowed) == options["top_k"]


def test_stop_ids_may_be_drawn_from_min_tokens_on(logits: np.ndarray) -> None:
    best = int(logits.argmax())
    options: dict[str, Any] = {"stop_ids": (best,), "min_tokens": 3, "temperature": 0.0}
    for count in range(5):
        opened = opening(0, [1, 2], [5] * count, **options)
        assert (_batch(logits[None], [opened])[0][0] == best) == (count >= 3)


def test_each_row_has_its_own_parameters(logits: np.ndarray) -> None:
    """The parameters of other rows must not influence a row, though the batch does the work for all."""
    shapes = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.4},
        {"repetition_penalty": 3.0, "temperature": 0.0},
        {"presence_penalty": 2.0, "temperature": 0.0},
        {"logit_bias": {4: 100.0}},
        {"min_tokens": 9, "temperature": 0.0},
    ]
    best = np.argsort(-logits)[:4].tolist()
    opened = [opening(0, best[:2], best[2:], stop_ids=tuple(best), max_tokens=20, **shape) for shape in shapes]
    tokens, _ = _batch(np.tile(logits, (len(opened), 1)), opened)
    for row, one in enumerate(opened):
        assert plain_sampling.probabilities(logits, one)[tokens[row]] > 0, shapes[row]
        assert _batch(logits[None], [one])[0][0] == tokens[row]


def test_a_seeded_draw_depends_on_seed_sample_and_position_alone(logits: np.ndarray) -> None:
    rng = np.random.default_rng(3)
    mine = [opening(0, [1], [2] * length, seed=length % 5, sample=length % 3) for length in range(8)]
    others = [opening(0, [1], [3], seed=int(rng.integers(1000)), top_k=2) for _ in range(DRAWS // 64 - 8)]
    alone = [_batch(logits[None], [one])[0][0] for one in mine]
    places = rng.permutation(len(mine) + len(others))
    crowd = [(mine + others)[place] for place in places]
    noise = rng.normal(size=(len(crowd), VOCAB)).astype(np.float32)
    noise[np.isin(places, range(8))] = logits
    together, _ = _batch(noise, crowd)
    assert [together[list(places).index(i)] for i in range(8)] == alone


@pytest.mark.parametrize("field", ["seed", "sample", "position"])
def test_draws_differ_by_seed_sample_and_position(field: str) -> None:
    """Draws are independent: neighbours agree only by chance."""
    flat = np.zeros((2 * VOCAB, VOCAB), np.float32)
    which = range(2 * VOCAB)
    if field == "position":
        opened = [opening(0, [1], [2] * i) for i in which]
    else:
        opened = [opening(0, **{field: i}) for i in which]
    tokens, _ = _batch(flat, opened)
    assert len(set(tokens.tolist())) > 0.8 * VOCAB
    assert (tokens[1:] == tokens[:-1]).sum() < 15


@pytest.mark.parametrize("seed", [5 + 2**32, 5 - 2**63, -1])
def test_all_bits_of_a_seed_count(seed: int) -> None:
    flat = np.zeros((64, VOCAB), np.float32)
    low, _ = _batch(flat, [opening(0, [1], [2] * i, seed=5) for i in range(64)])
    other, _ = _batch(flat, [opening(0, [1], [2] * i, seed=seed) for i in range(64)])
    assert (low == other).sum() < 8


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(_sample, id="kernel"),
        pytest.param(_sample_by_xla, id="xla"),
        pytest.param(_sample_by_triton, id="triton", marks=[pytest.mark.grid, pytest.mark.interpreted]),
    ],
)
def test_any_number_is_refused_or_draws_what_it_means(logits: np.ndarray, sample: Callable[..., Any]) -> None:
    """Also where float32 has no such number. Numbers that reach the engine are in `test_extreme_numbers.py`."""
    best = np.argsort(-logits)
    seen: dict[str, Any] = {"prompt": best[[0, 5, 400]].tolist(), "outputs": best[[1, 5, 599]].tolist()}
    opened: list[SlotOpen] = []
    for (name, value), temperature in itertools.product(extremes(SamplingParams), (0.0, 1.0)):
        options = {"temperature": temperature, "max_tokens": 2**31 - 1, name: value}
        try:
            opened.append(opening(0, stop_ids=(int(best[0]),), **seen, **options))
        except InvalidRequestError as error:
            shown = next(iter(value.values())) if isinstance(value, dict) else value
            if error.param != name or str(shown) not in str(error):
                raise
    many = [msgspec.structs.replace(opened[i % len(opened)], sample=i) for i in range(DRAWS)]
    tokens, _ = sample(np.tile(logits, (DRAWS, 1)), *_rows(many))
    for i, one in enumerate(opened):
        with np.errstate(over="ignore"):  # of logits divided by a temperature near 0
            expected = plain_sampling.probabilities(logits, one)
        assert expected[np.asarray(tokens)[i :: len(opened)]].all(), one.sampling


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(logits: np.ndarray, temperature: float) -> None:
    found = _draws(logits, opening(temperature=temperature))
    assert np.flatnonzero(found).tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("top_p", [1e-30, 1e-40, 1e-300])
def test_a_tiny_top_p_is_greedy(logits: np.ndarray, top_p: float) -> None:
    found = _draws(logits, opening(top_p=top_p))
    assert np.flatnonzero(found).tolist() == [int(logits.argmax())]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 1e-9}, {"temperature": 100.0}], ids=str
)
def test_tokens_of_probability_zero_are_never_drawn(options: dict[str, Any]) -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[0, 255, 256, 590]] = [1.0, 2.0, 0.0, 1.5]
    found = _draws(logits, opening(**options))
    assert np.flatnonzero(found).tolist() == [0, 255, 256, 590]


def test_a_change_in_the_last_bits_changes_hardly_any_draw(logits: np.ndarray) -> None:
    opened = [opening(0, [1], [2] * (i % 64), seed=i // 64) for i in range(DRAWS)]
    rng = np.random.default_rng(0)
    many = np.tile(logits, (DRAWS, 1))
    moved = many + rng.uniform(-4e-5, 4e-5, many.shape).astype(np.float32)
    assert (_batch(many, opened)[0] != _batch(moved, opened)[0]).sum() < 5


def test_the_kernel_draws_what_xla_draws(logits: np.ndarray) -> None:
    shapes: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.02}]
    opened = [opening(0, [1], [2] * i, seed=i, **shapes[i % len(shapes)]) for i in range(1000)]
    rng = np.random.default_rng(0)
    many = np.stack([rng.permutation(logits) for _ in opened])
    by_xla, _ = _sample_by_xla(many, *_rows(opened))
    assert (_batch(many, opened)[0] != np.asarray(by_xla)).sum() < 2


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (KernelTarget("cuda", "NVIDIA H200", (9, 0)), True),
        (KernelTarget("gpu", "NVIDIA A100", (8, 0)), True),
        (KernelTarget("gpu", "Tesla T4", (7, 5)), False),
        (KernelTarget("tpu", "TPU v6 lite"), False),
        (CPU, False),
    ],
    ids=str,
)
def test_only_nvidia_gpus_from_ampere_on_use_triton(target: KernelTarget, expected: bool) -> None:
    assert (row_kernels(target) is not None) is expected


@pytest.mark.interpreted
def test_triton_draws_what_the_cpu_draws(logits: np.ndarray) -> None:
    """With each kind of edit, at all positions around `min_len`, with slots in another order than rows."""
    shapes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.7, "top_k": 7},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5, "top_p": 0.9},
        {"logit_bias": {0: 5.0, 300: 4.0, 599: 6.0}, "min_p": 0.02},
        {"min_tokens": 3, "temperature": 0.0},
        {"min_tokens": 3, "repetition_penalty": 0.6, "logit_bias": {5: 9.0, 599: 9.0}, "logprobs": 3},
    ]
    rng = np.random.default_rng(0)
    best = np.argsort(-logits)
    stop_ids = (int(best[0]), int(best[1]), 5)
    opened = [
        opening(0, best[:3].tolist(), [int(best[4])] * (i % 5 + 1), seed=i, stop_ids=stop_ids, **shapes[i % 7])
        for i in range(210)
    ]
    many = np.stack([rng.permutation(logits) if i % 3 else logits for i in range(len(opened))])
    expected = _batch(many, opened)
    tokens, found = _sample_by_triton(many, *_rows(opened))
    assert (np.asarray(tokens) != expected[0]).sum() < 2
    asked = [
        row for row, one in enumerate(opened) if one.sampling.logprobs is not None and tokens[row] == expected[0][row]
    ]
    assert len(asked) > 20
    for mine, wanted in zip((found.chosen, found.top), (expected[1].chosen, expected[1].top)):
        np.testing.assert_allclose(np.asarray(mine)[asked], np.asarray(wanted)[asked], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found.top_ids)[asked], np.asarray(expected[1].top_ids)[asked])


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(_sample, id="cpu"),
        pytest.param(_sample_by_xla, id="xla"),
        pytest.param(_sample_by_triton, id="triton", marks=pytest.mark.interpreted),
    ],
)
def test_only_allowed_tokens_are_drawn(logits: np.ndarray, sample: Callable[..., Any]) -> None:
    """As if the model gave the others no chance, but log probabilities are the model's own."""
    shapes: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"temperature": 0.0},
        {"top_k": 3, "repetition_penalty": 1.5},
        {"top_p": 0.5, "min_tokens": 9},
        {"logit_bias": {3: 100.0}, "temperature": 0.0},
    ]
    opened = [opening(0, [1], [2, 2], seed=i, stop_ids=(5,), **shapes[i % len(shapes)]) for i in range(100)]
    rng = np.random.default_rng(0)
    allowed = rng.random((100, VOCAB)) < rng.choice([0.01, 0.5], (100, 1))
    allowed[:, 9] = True  # at least one
    allowed[::7] = np.arange(VOCAB) == 599
    words = np.packbits(allowed, axis=1, bitorder="little")
    words = np.pad(words, ((0, 0), (0, -words.shape[1] % 4))).view(np.int32)
    many = np.stack([rng.permutation(logits) for _ in opened])
    rows = _rows(opened)
    tokens, found = sample(many, *rows, words)
    expected, _ = sample(np.where(allowed, many, -np.inf), *rows)
    np.testing.assert_array_equal(tokens, expected)
    assert np.take_along_axis(allowed, np.asarray(tokens)[:, None], axis=1).all()
    free = np.asarray(_logprobs(many, np.asarray(tokens)).chosen)
    np.testing.assert_allclose(np.asarray(found.chosen)[::5], free[::5], atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"logprobs": 3}, {"repetition_penalty": 1.5, "logit_bias": {7: 3.0}}], ids=str)
def test_rows_after_the_needed_ones_may_hold_anything(logits: np.ndarray, options: dict[str, Any]) -> None:
    opened = [opening(0, [1, 5], [2] * i, seed=i, **options) for i in range(21)]
    rng = np.random.default_rng(0)
    many = np.stack([rng.permutation(logits) for _ in opened])
    expected = _batch(many, opened)
    many[11:] = np.nan
    found = _sample_first(many, *_rows(opened), np.int32(11))
    for some, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(some[:11], wanted[:11])
    if "logprobs" in options:
        assert not np.asarray(found[1].chosen)[16:].any()  # of a group without a needed row


def test_a_row_that_draws_nothing_asks_for_nothing(logits: np.ndarray) -> None:
    opened = [opening(seed=i, **({"logprobs": 3} if i == 2 else {})) for i in range(3)]
    many = np.stack([logits, logits, np.full_like(logits, np.nan)])
    tokens, found = _sample_first(many, *_rows(opened), np.int32(2))
    np.testing.assert_array_equal(tokens[:2], _batch(many, opened)[0][:2])
    assert not np.asarray(found.top).any()


def test_a_vast_range_of_logits() -> None:
    logits = np.linspace(-1e5, 1e5, VOCAB).astype(np.float32)
    assert np.flatnonzero(_draws(logits, opening(top_p=0.9, top_k=50, min_p=0.01))).tolist() == [VOCAB - 1]


def test_equals_at_the_edge_of_top_k_are_all_kept() -> None:
    logits = np.full(VOCAB, -50.0, np.float32)
    logits[[3, 4, 5, 6]] = [2.0, 1.0, 1.0, 1.0]
    assert np.flatnonzero(_draws(logits, opening(top_k=2))).tolist() == [3, 4, 5, 6]


def test_logprobs_are_those_of_the_model(logits: np.ndarray) -> None:
    rng = np.random.default_rng(5)
    many = (logits + rng.normal(size=(6, VOCAB))).astype(np.float32)
    opened = [opening(seed=i, logprobs=i, top_k=3, temperature=2.0, logit_bias={7: 50.0 * (i % 2)}) for i in range(6)]
    tokens, found = _batch(many, opened)
    wide = many.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    order = np.argsort(-expected, axis=1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(found.top_ids, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, 1), atol=1e-5)
    np.testing.assert_allclose(found.chosen, expected[np.arange(6), tokens], atol=1e-5)
    assert tokens[1::2].tolist() == [7, 7, 7]


def test_logprobs_of_given_tokens_and_a_small_vocabulary() -> None:
    logits = np.array([[0.0, 1.0, 2.0], [5.0, -np.inf, 5.0]], np.float32)
    found = _logprobs(logits, np.array([0, 2], np.int32))
    assert found.top_ids.shape == (2, 3)
    np.testing.assert_allclose(found.chosen, [-2.4076059, -0.6931472], atol=1e-6)
    np.testing.assert_array_equal(found.top_ids[0], [2, 1, 0])
    np.testing.assert_allclose(found.top[1], [-0.6931472, -0.6931472, -np.inf], atol=1e-6)
