from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.budget import PrefillBudget, trim_to_bucket

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
    assert trim_to_bucket(total, last, BUCKETS) == cut


@given(st.integers(1, 128), st.data())
def test_trim_always_leaves_progress_and_lands_on_a_bucket(total: int, data: st.DataObject) -> None:
    last = data.draw(st.integers(1, total))
    cut = trim_to_bucket(total, last, BUCKETS)
    assert 0 <= cut < last
    assert cut == 0 or total - cut in BUCKETS


def test_budget_of_prefill_and_step() -> None:
    budget = PrefillBudget(4, step_tokens=16, prefill_tokens=10, prompt_logprob_tokens=8)
    assert budget.offer(prompt_logprobs=False) == 10
    budget.take(3, prompt_logprobs=False)
    assert budget.offer(prompt_logprobs=False) == 7
    assert budget.offer(prompt_logprobs=True) == 1
    budget.take(1, prompt_logprobs=True)
    assert budget.total == 8
    assert budget.offer(prompt_logprobs=False) == 0, "the step is one of prompt logprobs now"


def test_decodes_may_leave_nothing() -> None:
    budget = PrefillBudget(20, step_tokens=16, prefill_tokens=10, prompt_logprob_tokens=8)
    assert budget.offer(prompt_logprobs=False) == 0
