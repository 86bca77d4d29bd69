"""What tests cost is known and stays within limits; `tests/budgets.py` says how."""

from __future__ import annotations

from pathlib import Path

from tests.budgets import BUDGETS, costs

ROOT = Path(__file__).parents[1]
PROCESSES = 3
MINUTES = 10
"""A run that interprets all kernels takes these; most runs leave out the kernels that were proved."""


def test_every_file_that_costs_something_has_a_budget() -> None:
    without = {file: sorted(marks) for file, marks in costs.items() if marks and file not in BUDGETS}
    assert not without, "give these files seconds in tests/budgets.json: 'What a test may cost' in CONTRIBUTING.md"


def test_budgets_are_of_files_that_exist() -> None:
    assert not [file for file in BUDGETS if not (ROOT / file).is_file()]


def test_all_of_it_takes_few_minutes() -> None:
    assert sum(BUDGETS.values()) <= PROCESSES * 60 * MINUTES, "make something cheaper first"
