"""The TPU backend's work list and tiles."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import Gate, Groups, grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_tpu import backend
from pallas_kernels.grouped_matmul.mosaic_tpu.work import work_list
from pallas_kernels.quantized_matmul import Backend, Scheme
from pallas_kernels.target import CPU
from tests.pallas_kernels.grouped_matmul.cases import Case, make_case


@pytest.mark.parametrize("rows", [1, 16, 37, 64])
@pytest.mark.parametrize("experts", [1, 4, 40])
def test_the_work_list_has_each_tile_of_an_expert_once(rows: int, experts: int) -> None:
    rng = np.random.default_rng(rows * experts)
    for share in (0.0, 0.5, 1.0):
        paired = round(rows * share)
        starts = np.sort(np.concatenate([[0], rng.integers(0, paired + 1, experts - 1), [paired]])).astype(np.int32)
        groups = Groups(jnp.asarray(starts), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 1), jnp.int32))
        work = jax.jit(work_list, static_argnums=1)(groups, 16)
        expected = [
            (expert, tile)
            for expert, (begin, end) in enumerate(itertools.pairwise(starts.tolist()))
            for tile in (range(begin // 16, (end - 1) // 16 + 1) if end > begin else ())
        ]
        found = list(zip(work.experts.tolist(), work.tiles.tolist(), strict=True))
        assert work.count.tolist() == [len(expected)]
        assert found[: len(expected)] == expected
        # Nothing is copied for an entry that repeats the one before
        assert set(found[len(expected) :]) <= {expected[-1] if expected else (0, 0)}


# 384 outputs are whole tiles, of 200 the last tile is a part
@pytest.mark.parametrize("out", [384, 200])
@pytest.mark.parametrize("scheme", [None, Scheme("int4", 32, zeros=True)], ids=["bf16", "int4"])
@pytest.mark.interpreted
def test_outputs_are_cut_into_tiles(scheme: Scheme | None, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for several tiles."""
    monkeypatch.setattr(backend, "_TILE_BYTES", 2**14)
    case = Case(f"tiles-{out}", scheme, tokens=9, experts=4, out=out, gate=Gate(), bias=True, of_tokens=True)
    held = Backend("mosaic_tpu", CPU)
    x, weight, groups, bias, expected, allowed = make_case(case, held)
    result = grouped_matmul(x, weight, groups, bias=bias, gate=case.gate, of_tokens=True, target=CPU, backend=held)
    found = np.asarray(result)[: len(expected)].astype(np.float64)
    assert (np.abs(found - expected) <= allowed).all()
