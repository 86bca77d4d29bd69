from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.step.page_copies import PAGES_PER_COPY, read_key, row_specs, write_key
from jaxserve.runtime.step.state import DeviceState
from tests.runtime.tiny import CAPACITY, builder, on_trees, specs, zero_state

LAYERS = 2


@functools.cache
def _program(key: str) -> Any:
    return on_trees(builder().compile(key))


def _random_state() -> DeviceState:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 99, x.shape), x.dtype), zero_state(CAPACITY))


def _pages(*pages: int) -> np.ndarray:
    return np.array([[*pages, *[-1] * (PAGES_PER_COPY - len(pages))]], np.int32)


def test_pages_are_copied_to_the_host_and_back_to_other_pages() -> None:
    state = _random_state()
    before = jax.tree.map(np.array, state)
    host = HostPool(row_specs(specs(CAPACITY), 0), 10)
    state, rows = _program(read_key(0))((), state, _pages(7, 2, 19))
    host.store([[9, 0, 4]], rows)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(state)):
        np.testing.assert_array_equal(one, other)
    state, _ = _program(write_key(0))((), state, _pages(3, 5), *host.fetch([[4, 9]]))
    for name in ("keys", "values"):
        expected = getattr(before.kv[0], name)
        for layer in range(LAYERS):
            at = layer * CAPACITY.num_pages
            expected[:, :, [at + 3, at + 5]] = expected[:, :, [at + 19, at + 7]]
        np.testing.assert_array_equal(getattr(state.kv[0], name), expected)
    for one, other in zip(jax.tree.leaves(before.replace(kv=None)), jax.tree.leaves(state.replace(kv=None))):
        np.testing.assert_array_equal(one, other)
