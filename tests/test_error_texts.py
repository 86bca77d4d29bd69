from __future__ import annotations

from jaxserve.error_texts import join_differences, join_first


def test_a_long_list_is_cut_and_says_so() -> None:
    assert join_first(["a", "b"], 2) == "a, b"
    assert join_first(["a", "b", "c", "d"], 2, "; ") == "a; b and 2 more"


def test_differences_are_named_with_both_values() -> None:
    ours = {"a": 1, "b": {"c": [2], "d": 3}, "e": None}
    theirs = {"a": 1, "b": {"c": [4], "d": 3}, "f": "x"}
    assert join_differences(ours, ours, there="there", here="here") == ""
    assert join_differences(theirs, ours, there="there", here="here") == (
        "b.c is [4] there and [2] here; f is 'x' there and None here"
    )
    many = {str(number): number for number in range(6)}
    assert join_differences({}, many, there="there", here="here").endswith("3 is None there and 3 here and 2 more")
