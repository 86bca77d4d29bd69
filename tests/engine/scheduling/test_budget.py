from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.scheduling.budget import PrefillBudget, trim_to_bucket

BUCKETS = (16, 32, 64, 128)


@pytest.mark.parametrize(
    ("total", "last", "cut"),
    [
        (16, 16, 0),  # exact
        (10, 10, 0),  # below the smallest
        (19, 10, 3),  # 3 is less than a quarter of 16
        (20, 10, 0),  # 4 is not
        (19, 5, 0),  # less than half of the chunk would stay
        (79, 40, 15),
        (80, 40, 0),
        (200, 100, 0),  # beyond the largest
    ],
)
def test_trim(total: int, last: int, cut: int) -> None:
    assert trim_to_bucket([total], [last], BUCKETS) == [cut]


@pytest.mark.parametrize(
    ("totals", "lasts", "cuts"),
    [
        ([19, 4], [10, 2], [3, 0]),  # the fullest rank decides
        ([19, 18], [10, 4], [3, 2]),
        ([19, 18], [10, 0], [0, 0]),  # rank 1 can't be cut, so the larger program is needed anyway
        ([19, 20], [19, 20], [0, 0]),
        ([3, 0], [3, 0], [0, 0]),
    ],
)
def test_all_ranks_are_trimmed_or_none(totals: list[int], lasts: list[int], cuts: list[int]) -> None:
    assert trim_to_bucket(totals, lasts, BUCKETS) == cuts


@given(st.integers(1, 128), st.data())
def test_trim_leaves_at_least_one_token_and_ends_at_a_bucket(total: int, data: st.DataObject) -> None:
    last = data.draw(st.integers(1, total))
    [cut] = trim_to_bucket([total], [last], BUCKETS)
    assert 0 <= cut < last
    assert cut == 0 or total - cut in BUCKETS


def test_budget_of_prefill_and_step() -> None:
    budget = PrefillBudget([4], step_tokens=16, prefill_tokens=10, prompt_logprob_tokens=8)
    assert budget.max_chunk(0, prompt_logprobs=False) == 10
    budget.add_chunk(0, 3, prompt_logprobs=False)
    assert budget.max_chunk(0, prompt_logprobs=False) == 7
    assert budget.max_chunk(0, prompt_logprobs=True) == 1
    budget.add_chunk(0, 1, prompt_logprobs=True)
    assert budget.totals == [8]
    assert budget.max_chunk(0, prompt_logprobs=False) == 0, "the step has prompt logprobs now"


def test_decodes_may_use_the_whole_budget() -> None:
    budget = PrefillBudget([20], step_tokens=16, prefill_tokens=10, prompt_logprob_tokens=8)
    assert budget.max_chunk(0, prompt_logprobs=False) == 0


def test_ranks_have_separate_budgets_but_one_program() -> None:
    budget = PrefillBudget([4, 0], step_tokens=16, prefill_tokens=10, prompt_logprob_tokens=8)
    budget.add_chunk(0, 10, prompt_logprobs=False)
    assert budget.max_chunk(0, prompt_logprobs=False) == 0
    assert budget.max_chunk(1, prompt_logprobs=False) == 10
    assert budget.max_chunk(1, prompt_logprobs=True) == 0, "rank 0 has more tokens than that program holds"
    budget = PrefillBudget([4, 0], step_tokens=16, prefill_tokens=10, prompt_logprob_tokens=8)
    budget.add_chunk(1, 3, prompt_logprobs=True)
    assert budget.max_chunk(0, prompt_logprobs=False) == 4
    assert budget.max_chunk(1, prompt_logprobs=False) == 5
