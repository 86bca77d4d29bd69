"""Unpacking in a program returns exactly the values that were packed on the host."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from tests.selection import examples

TABLE = InputPacking(
    [
        PackedField("one", fill=-1),
        PackedField("ids", 5, fill=-7),
        PackedField("weights", 3, is_float=True),
        PackedField("temperature", is_float=True),
        PackedField("row", 1, fill=3),
        PackedField("rest", 2),
    ]
)
_unpack = jax.jit(TABLE.unpack)


def _ints(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-(2**31), 2**31 - 1), max_size=length)


def _floats(length: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(width=32, allow_nan=False), max_size=length)


@settings(max_examples=examples(50))
@given(one=_ints(1), ids=_ints(5), weights=_floats(3), temperature=_floats(1), row=_ints(1), rest=_ints(2))
def test_round_trip(**given: list[float]) -> None:
    packed = TABLE.pack(given)
    assert packed.shape == (13,)
    assert packed.dtype == np.int32
    found = _unpack(packed)
    for field in TABLE.fields:
        fill = [0.0 if field.is_float else field.fill] * field.size
        values = given[field.name] + fill[len(given[field.name]) :]
        expected = np.array(values, np.float32 if field.is_float else np.int32)
        assert found[field.name].shape == (() if field.length is None else (field.length,))
        np.testing.assert_array_equal(np.atleast_1d(found[field.name]), expected)


def test_each_vector_is_new() -> None:
    first = TABLE.pack({"ids": [1, 2, 3]})
    TABLE.pack({"ids": [4, 5, 6, 7, 8]})
    assert first[TABLE.offsets["ids"] :][:5].tolist() == [1, 2, 3, -7, -7]


def test_too_many_values_for_a_field_are_refused() -> None:
    with pytest.raises(AssertionError, match="rest"):
        TABLE.pack({"rest": [1, 2, 3]})
