"""Rows are computed in groups, up to the last one that is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.step.groups import in_groups
from jaxserve.runtime.step.sampling import DrawnRows
from jaxserve.runtime.step.step import sample_rows
from tests.runtime.tiny import on_mesh


@pytest.mark.parametrize(
    ("needed", "counts"), [(0, []), (1, [1] * 3), (3, [3] * 3), (5, [3] * 3 + [2] * 3), (7, [3] * 4 + [3] * 3)], ids=str
)
def test_groups_without_a_needed_row_are_left_out(needed: int, counts: list[int]) -> None:
    def compute(some: Any, count: Any) -> Any:
        return some["x"] * 2, jnp.full(3, count)

    rows = {"x": jnp.arange(1, 8)}
    doubled, found = jax.jit(lambda rows, needed: in_groups(compute, rows, needed, 3))(rows, np.int32(needed))
    np.testing.assert_array_equal(found, counts + [0] * (7 - len(counts)))
    np.testing.assert_array_equal(doubled, np.where(np.asarray(found) > 0, 2 * np.arange(1, 8), 0))


@pytest.mark.parametrize("rows", [40, 16])
def test_the_head_computes_needed_rows_only(rows: int) -> None:
    """The head here draws how many rows of its group it was asked for."""
    context: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(vocab_size=32)), sample_rows=16)
    state: Any = SimpleNamespace(seq_lens=jnp.zeros(rows))

    def head(hidden: Any, num_rows: Any) -> Any:
        return jnp.tile(jnp.arange(32) == num_rows, (len(hidden), 1)).astype(jnp.float32)

    def draw(live: Any) -> Any:
        slots = jnp.arange(rows, dtype=jnp.int32)
        own = DrawnRows(slots, slots, slots < live)
        return sample_rows(head, jnp.zeros((rows, 8)), own, live, state, context, greedy=True)[0]

    run = on_mesh(draw)
    np.testing.assert_array_equal(run(np.int32(5))[:16], [5] * 16)
    np.testing.assert_array_equal(run(np.int32(16)), [16] * 16 + [0] * (rows - 16))
    if rows > 16:
        np.testing.assert_array_equal(run(np.int32(21)), [16] * 16 + [5] * 16 + [0] * 8)
