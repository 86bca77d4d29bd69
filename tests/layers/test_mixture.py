"""A mixture computes the tokens of the batch with the experts they chose, and no other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.layers.mixture import ExpertParams, MixtureParams, MixtureSettings, RouterParams, mixture
from jaxserve.runtime.devices.mesh import make_mesh
from pallas_kernels.expert_routing import Routing
from pallas_kernels.grouped_matmul import Gate
from pallas_kernels.target import CPU

EXPERTS, DIM, WIDTH = 6, 32, 16
RNG = np.random.default_rng(0)
UP, DOWN = RNG.standard_normal((EXPERTS, 2, WIDTH, DIM)), RNG.standard_normal((EXPERTS, DIM, WIDTH))
X = RNG.standard_normal((5, DIM))


def computed(router: np.ndarray, live: int, routing: Routing, up: np.ndarray = UP) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of five tokens, of which the first are live, and how many tokens each expert computed."""
    arrays = [jnp.asarray(x, jnp.float32) for x in (X, router, up, DOWN)]

    def run(x: Any, router: Any, up: Any, down: Any) -> tuple[jax.Array, jax.Array]:
        params = MixtureParams(RouterParams(router), ExpertParams(up, down))
        return mixture(x, params, jnp.arange(5) < live, MixtureSettings(EXPERTS, routing, Gate(), CPU))

    whole = PartitionSpec()
    mesh = make_mesh(jax.devices("cpu"))
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(whole,) * 4, out_specs=whole, check_vma=False))
    out, loads = program(*arrays)
    return np.asarray(out, np.float64), np.asarray(loads)


def mixed(router: np.ndarray, live: int, routing: Routing, up: np.ndarray = UP) -> np.ndarray:
    return computed(router, live, routing, up)[0]


def expert(i: int, x: np.ndarray) -> np.ndarray:
    gate, up = x @ UP[i, 0].T, x @ UP[i, 1].T
    return gate / (1 + np.exp(-gate)) * up @ DOWN[i].T


def test_all_tokens_may_choose_the_same_experts() -> None:
    """Without any preference, those of lowest index."""
    found = mixed(np.zeros((EXPERTS, DIM)), 5, Routing(2, renormalize=True))
    np.testing.assert_allclose(found, (expert(0, X) + expert(1, X)) / 2, rtol=1e-4, atol=1e-4)


def test_each_token_gets_its_own_experts_by_their_weights() -> None:
    router = RNG.standard_normal((EXPERTS, DIM))
    scores = np.exp(X @ router.T)
    scores /= scores.sum(axis=1, keepdims=True)
    expected = np.zeros_like(X)
    for token, row in enumerate(scores):
        for i in np.argsort(-row)[:3]:
            expected[token] += row[i] * expert(i, X[token])
    np.testing.assert_allclose(mixed(router, 5, Routing(3)), expected, rtol=1e-4, atol=1e-4)


def test_padding_chooses_no_expert() -> None:
    found = mixed(np.zeros((EXPERTS, DIM)), 3, Routing(2, renormalize=True))
    np.testing.assert_allclose(found[:3], (expert(0, X[:3]) + expert(1, X[:3])) / 2, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[3:], 0)


def test_the_loads_of_experts_count_live_tokens() -> None:
    router = RNG.standard_normal((EXPERTS, DIM))
    chosen = np.argsort(-(X @ router.T), axis=1)[:4, :3]
    _, loads = computed(router, 4, Routing(3))
    np.testing.assert_array_equal(loads, np.bincount(chosen.ravel(), minlength=EXPERTS))
