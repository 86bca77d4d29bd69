"""Tokens of experts are counted over all ranks, and beyond what a counter of the device holds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.execution.expert_tokens import ExpertTokens


def test_a_dense_model_has_none() -> None:
    counted = ExpertTokens()
    counted.record(None)
    assert counted.read() == ()


def test_ranks_are_added_and_dense_layers_have_no_counts() -> None:
    counted = ExpertTokens((1, 3), 2)
    assert counted.read() == ((), (0, 0), (), (0, 0))
    counted.record(jnp.asarray([[[1, 2], [3, 4]], [[10, 20], [30, 40]]], jnp.uint32))
    assert counted.read() == counted.read() == ((), (11, 22), (), (33, 44))


def test_totals_go_on_where_a_counter_starts_again() -> None:
    counted = ExpertTokens((0,), 2)
    most = 2**32 - 5
    for step in range(3):
        counted.record(jnp.asarray(np.asarray([[[most, 7]]], np.int64) * (step + 1) % 2**32, jnp.uint32))
        assert counted.read() == ((most * (step + 1), 7 * (step + 1)),)


def test_counters_are_read_before_they_can_overflow_twice() -> None:
    """Without any reading from outside."""
    steps, tokens = 20_000, 2**20
    counted = ExpertTokens((0,), 1, tokens)
    for step in range(1, steps + 1):
        counted.record(np.asarray([[[step * tokens % 2**32]]], np.uint32))  # type: ignore[arg-type]
    assert counted.read() == ((steps * tokens,),)
