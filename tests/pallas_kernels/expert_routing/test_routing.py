"""Routing against a truth in numpy, token by token: the reference, and the kernels of NVIDIA GPUs, interpreted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_routing import Routing, choose_experts, group_by_expert, reference, triton
from pallas_kernels.target import CPU
from tests.selection import grid, is_interpreted


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` that choose among `experts`; the `spread` of logits is their standard deviation."""

    name: str
    routing: Routing
    experts: int = 128
    tokens: int = 7
    correction: bool = False
    spread: float = 2.0

    def __str__(self) -> str:
        return self.name


DEEPSEEK = Routing(8, "sigmoid", renormalize=True, scale=2.5, groups=8, groups_chosen=4)
CASES = (
    Case("softmax", Routing(8)),
    Case("softmax-renormalized", Routing(8, renormalize=True), tokens=300),
    Case("softmax-one-token", Routing(2, renormalize=True), experts=8, tokens=1),
    Case("softmax-one-choice", Routing(1), experts=16),
    Case("softmax-60-experts", Routing(4), experts=60, tokens=20),
    Case("softmax-underflows", Routing(8), spread=200.0),
    Case("softmax-groups", Routing(6, groups=8, groups_chosen=3, scale=16.0), experts=160),
    Case("softmax-best-of-group", Routing(6, groups=8, groups_chosen=3, scale=16.0, best_of_group=1), experts=160),
    Case("softmax-groups-of-one", Routing(2, groups=4, groups_chosen=3), experts=4),
    Case("chosen", Routing(4, "softmax_of_chosen"), experts=32, tokens=30),
    Case("chosen-corrected", Routing(4, "softmax_of_chosen"), correction=True),
    Case("chosen-all", Routing(10, "softmax_of_chosen"), experts=10),
    Case("sigmoid", Routing(1, "sigmoid"), experts=16),
    Case("sigmoid-saturated", Routing(8, "sigmoid", renormalize=True), spread=50.0),
    Case("sigmoid-corrected", Routing(8, "sigmoid", renormalize=True, scale=1.5), experts=160, correction=True),
    Case("deepseek", DEEPSEEK, experts=256, tokens=40, correction=True),
    Case("deepseek-many", DEEPSEEK, experts=256, tokens=300, correction=True),
    Case("choices-10", Routing(10, renormalize=True), experts=512),
)
QUICK = (
    "softmax",
    "softmax-60-experts",
    "softmax-underflows",
    "softmax-groups",
    "softmax-best-of-group",
    "chosen-all",
    "deepseek",
)

Chooser = Callable[..., tuple[jax.Array, jax.Array]]


def _by_triton(logits: Any, correction: Any, routing: Routing) -> tuple[jax.Array, jax.Array]:
    return triton.choose_experts(logits, correction, routing, interpret=True)


CHOOSERS = [
    pytest.param(reference.choose_experts, id="reference"),
    pytest.param(_by_triton, id="triton", marks=pytest.mark.interpreted),
]


def _logits(case: Case) -> tuple[np.ndarray, np.ndarray | None]:
    """Return logits, some tokens' with many equal ones, of -inf, or huge; and the correction."""
    rng = np.random.default_rng(sum(case.name.encode()))
    logits = (rng.standard_normal((case.tokens, case.experts)) * case.spread).astype(np.float32)
    if case.tokens > 6:
        # No -0, which XLA sorts before 0.
        logits[1] = np.round(logits[1]) + 0.0
        logits[2] = 0.5
        logits[3, : case.experts - (case.routing.choices + 1) // 2] = -np.inf
        logits[4, ::3] = 1e30
        logits[5, 1::2] = -np.inf
    correction = (rng.standard_normal(case.experts) * 0.3).astype(np.float32) if case.correction else None
    return logits, correction


def _truth(logits: np.ndarray, correction: np.ndarray | None, routing: Routing) -> tuple[list[int], np.ndarray]:
    """Return the choices of one token and their weights in float64; choices are made by scores in float32."""
    scores = logits
    with np.errstate(over="ignore"):
        if routing.scores == "softmax":
            exponentials = _flushed(np.exp(logits - logits.max(), dtype=np.float32))
            scores = _flushed(exponentials / exponentials.sum(dtype=np.float32))
        elif routing.scores == "sigmoid":
            scores = (1 / (1 + np.exp(-logits, dtype=np.float32))).astype(np.float32)
    by = scores if correction is None else scores + correction
    if routing.groups > 1:
        groups = by.reshape(routing.groups, -1)
        sums = [np.sort(group)[-routing.best_of_group :].sum(dtype=np.float32) for group in groups]
        best = sorted(range(routing.groups), key=lambda group: (-sums[group], group))[: routing.groups_chosen]
        by = np.where(np.isin(np.arange(len(by)) // groups.shape[1], best), by, np.float32(-np.inf))
    chosen = sorted(range(len(by)), key=lambda expert: (-by[expert], expert))[: routing.choices]
    weights = scores[chosen].astype(np.float64)
    if routing.scores == "softmax_of_chosen":
        weights = np.exp(weights - weights.max())
        weights /= weights.sum()
    if routing.renormalize:
        weights /= weights.sum() + (1e-20 if routing.scores == "sigmoid" else 0)
    return chosen, weights * routing.scale


def _flushed(x: np.ndarray) -> np.ndarray:
    """Return 0 for subnormal numbers, as XLA's CPU takes them."""
    return np.where(x < np.finfo(np.float32).tiny, np.float32(0), x)


@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("case", grid(CASES, lambda case: case.name in QUICK), ids=str)
def test_tokens_choose_the_experts_of_highest_score(chooser: Chooser, case: Case) -> None:
    logits, correction = _logits(case)
    ids, weights = jax.jit(chooser, static_argnums=2)(logits, correction, case.routing)
    assert ids.shape == weights.shape == (case.tokens, case.routing.choices)
    for token in range(case.tokens):
        expected, of_expected = _truth(logits[token], correction, case.routing)
        assert list(ids[token]) == expected, (case, token)
        np.testing.assert_allclose(weights[token], of_expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_rows_that_are_no_numbers_change_no_other_row(chooser: Chooser) -> None:
    """Rows of a step that no token has may hold anything; they must still choose experts that there are."""
    logits = np.random.default_rng(0).standard_normal((3, 12)).astype(np.float32)
    broken = logits.copy()
    broken[1] = np.nan
    routing = Routing(4, renormalize=True)
    (ids, weights), (of_broken, other) = (chooser(jnp.asarray(one), None, routing) for one in (logits, broken))
    np.testing.assert_array_equal(ids[::2], of_broken[::2])
    np.testing.assert_array_equal(weights[::2], other[::2])
    assert ((of_broken >= 0) & (of_broken < 12)).all()


def _spread(name: str, rng: np.random.Generator, tokens: int, choices: int, experts: int) -> np.ndarray:
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :choices].astype(np.int32)
    if name == "one":
        ids[:] = np.arange(choices)
    elif name == "absent":
        ids[rng.random(ids.shape) < 0.5] = -1
        ids[rng.random(ids.shape) < 0.2] = experts + 5
    elif name == "none":
        ids[:] = experts
    return ids


GROUPS = [
    (1, 8, 128, "random"),
    (64, 8, 128, "random"),
    (300, 4, 60, "absent"),
    (20, 2, 8, "one"),
    (5, 1, 3, "none"),
    (33, 10, 257, "absent"),
    (1100, 8, 12, "absent"),
]


@pytest.mark.parametrize("way", grid(["reference", "triton"], bool, is_interpreted))
@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "spread"), grid(GROUPS, lambda one: one in (GROUPS[0], *GROUPS[2:5]))
)
def test_pairs_are_in_the_order_of_experts_then_tokens(
    way: str, tokens: int, choices: int, experts: int, spread: str
) -> None:
    ids = _spread(spread, np.random.default_rng(tokens), tokens, choices, experts)
    if way == "triton":
        groups = triton.group_by_expert(jnp.asarray(ids), experts, interpret=True)
    else:
        groups = reference.group_by_expert(jnp.asarray(ids), experts)
    pairs = tokens * choices
    rows = [(token, choice) for expert in range(experts) for token, choice in np.argwhere(ids == expert)]
    starts = [int((ids.ravel() < expert).sum() - (ids < 0).sum()) for expert in range(experts + 1)]
    places = np.full((tokens, choices), pairs)
    for row, (token, choice) in enumerate(rows):
        places[token, choice] = row
    np.testing.assert_array_equal(groups.starts, starts)
    np.testing.assert_array_equal(groups.tokens, [token for token, _ in rows] + [0] * (pairs - len(rows)))
    np.testing.assert_array_equal(groups.places, places)


def test_a_cpu_takes_the_reference() -> None:
    logits = jnp.asarray([[1.0, 3.0, 2.0]])
    ids, weights = choose_experts(logits, None, Routing(2, "softmax_of_chosen"), CPU)
    np.testing.assert_array_equal(ids, [[1, 2]])
    np.testing.assert_allclose(weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)
    np.testing.assert_array_equal(group_by_expert(ids, 3, CPU).starts, [0, 0, 1, 2])
