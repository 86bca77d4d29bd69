"""The kernels of a CPU give what the reference gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_routing import cpu, reference

SIZES = [(1, 1, 1), (5, 2, 8), (16, 2, 8), (64, 3, 60), (300, 8, 128)]


@pytest.mark.parametrize(("tokens", "choices", "experts"), SIZES)
def test_pairs_are_grouped_and_outputs_added(tokens: int, choices: int, experts: int) -> None:
    rng = np.random.default_rng(tokens)
    ids = jnp.asarray(rng.integers(-2, experts + 2, (tokens, choices)).astype(np.int32))
    groups, expected = cpu.group_by_expert(ids, experts), reference.group_by_expert(ids, experts)
    jax.tree.map(np.testing.assert_array_equal, groups, expected)
    rows = np.full((tokens * choices, 32), np.nan, np.float32)
    pairs = int(groups.starts[-1])
    rows[:pairs] = rng.standard_normal((pairs, 32))
    weights = jnp.asarray(rng.random((tokens, choices)).astype(np.float32))
    found, truth = (module.add_chosen(jnp.asarray(rows), groups.places, weights) for module in (cpu, reference))
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-6)


def test_no_pair_gives_zeros() -> None:
    groups = cpu.group_by_expert(jnp.full((7, 2), 9, jnp.int32), 4)
    assert groups.starts.tolist() == [0] * 5
    found = cpu.add_chosen(jnp.full((14, 16), jnp.nan), groups.places, jnp.ones((7, 2)))
    np.testing.assert_array_equal(found, np.zeros((7, 16)))
