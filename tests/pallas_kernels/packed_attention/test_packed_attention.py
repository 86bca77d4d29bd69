"""The backends that run on a CPU against float64, over the table of cases."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.packed_attention import BACKENDS, packed_attention
from pallas_kernels.target import target_of
from tests.pallas_kernels.packed_attention.cases import CASES, CORNERS, MORE, Batch, Case, check, make_batch
from tests.selection import grid


@functools.cache
def compiled(backend: BackendName) -> Any:
    """Return `packed_attention` of a backend."""
    chosen = Backend(backend, target_of(jax.devices()[0]))
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(functools.partial(packed_attention, backend=chosen), compiler_options=fast)


def skip_refused(case: Case, backend: BackendName) -> None:
    """Skip what a backend refuses."""
    if refusal := BACKENDS.refusal(backend, target_of(jax.devices()[0]), (case.problem,)):
        pytest.skip(refusal)


def run(batch: Batch, backend: BackendName) -> np.ndarray:
    """Compute the attention of a batch."""
    return np.asarray(compiled(backend)(batch.q, batch.k, batch.v, batch.texts, batch.options))


def _is_quick(values: tuple[Case, BackendName]) -> bool:
    case, backend = values
    return case.name not in MORE if backend == "cpu" else case.name in CORNERS


PAIRS = grid(itertools.product(CASES, ("reference", "cpu")), _is_quick)


@pytest.mark.parametrize(("case", "backend"), PAIRS, ids=str)
def test_equals_float64(case: Case, backend: BackendName) -> None:
    skip_refused(case, backend)
    batch = make_batch(case)
    check(case, batch, run(batch, backend))
