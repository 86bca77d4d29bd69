from __future__ import annotations

from jaxserve.cli.common.table import format_range, format_records, format_table


def test_columns_are_aligned() -> None:
    text = format_table(("name", "ms"), [("a", "1.00"), ("longer", "10.00")])
    assert text.splitlines() == ["name       ms", "a        1.00", "longer  10.00"]


def test_records_have_dashes_for_missing_values() -> None:
    text = format_records([{"name": "a", "ms": 1.5}, {"name": None}], decimals=2)
    assert text.splitlines() == ["name    ms", "   a  1.50", "   -     -"]
    assert format_records([{"a": 1, "b": 2}], ["b"]).splitlines() == ["b", "2"]


def test_a_range_is_unknown_if_a_number_is() -> None:
    assert [format_range(numbers) for numbers in ([3, 3], [4, 3], [3, None], [])] == ["3", "3-4", "-", "-"]
