"""The backends that run on a CPU against a loop over tokens in float64, over the table of cases."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.gated_delta import BACKENDS, DeltaStates, gated_delta
from pallas_kernels.target import target_of
from tests.pallas_kernels.gated_delta.cases import CASES, MORE, Batch, Case, check, make_batch
from tests.selection import grid


@functools.cache
def compiled(backend: BackendName) -> Any:
    """Return `gated_delta` of a backend, for one layer."""
    chosen = Backend(backend, target_of(jax.devices()[0]))
    # Compiling takes most of the time of these tests, and half of that is optimizing.
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(functools.partial(gated_delta, backend=chosen), compiler_options=fast)


def skip_refused(case: Case, backend: BackendName) -> None:
    """Skip what a backend refuses."""
    if refusal := BACKENDS.refusal(backend, target_of(jax.devices()[0]), (case.problem,)):
        pytest.skip(refusal)


def run(case: Case, batch: Batch, backend: BackendName) -> tuple[np.ndarray, DeltaStates]:
    """Compute a step."""
    layer = np.int32(case.layer)
    out, states = compiled(backend)(batch.products, batch.gates, batch.weights, batch.states, layer, batch.rows)
    return np.asarray(out), jax.tree.map(np.asarray, states)


def _is_quick(values: tuple[Case, BackendName]) -> bool:
    case, backend = values
    return case.name not in MORE if backend == "cpu" else case.name in ("mixed", "drafts")


PAIRS = grid(itertools.product(CASES, ("reference", "cpu")), _is_quick)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_equals_a_loop_over_tokens(case: Case, backend: BackendName) -> None:
    skip_refused(case, backend)
    batch = make_batch(case)
    check(case, batch, *run(case, batch, backend))
