from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.execution.host_pool import HostPool, host_pages
from jaxserve.runtime.step.state import ArraySpec

SPECS = [
    ArraySpec((1, 2, 3), np.dtype(jnp.bfloat16), (None,) * 3),
    ArraySpec((1, 2), np.dtype("f4"), (None,) * 2),
]
TWO_RANKS = [ArraySpec((2, 3), np.dtype("f4"), ("ranks", None))]


def _rows(first: float, second: float) -> tuple[Any, ...]:
    values = jnp.asarray([[first, second]], jnp.float32)
    return jnp.broadcast_to(values[..., None], (1, 2, 3)).astype(jnp.bfloat16), values


def _held(pool: HostPool, slot: int) -> list[float]:
    wide, flat = pool.fetch([[slot]])
    assert (wide.dtype, flat.dtype) == (SPECS[0].dtype, SPECS[1].dtype)
    return [*wide[0, 0].astype(float).tolist(), float(flat[0, 0])]


def test_the_last_row_sent_to_a_slot_stays() -> None:
    pool = HostPool(SPECS, 5)
    for value in range(100):
        pool.store([[value % 3, 4]], _rows(value, 50 + value))
    assert [_held(pool, slot) for slot in (0, 1, 2, 4)] == [[99.0] * 4, [97.0] * 4, [98.0] * 4, [149.0] * 4]


def test_slots_are_local_to_a_rank() -> None:
    pool = HostPool(TWO_RANKS, 4)
    pool.store([[0, 1], [1]], (jnp.asarray([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]),))
    pool.store([[], [0, 2]], (jnp.asarray([[9.0, 9.0, 9.0], [4.0, 5.0, 0.0]]),))
    [rows] = pool.fetch([[1, 0], [2, 1, 0]])
    assert rows[0, :2].tolist() == [2.0, 1.0]
    assert rows[1].tolist() == [5.0, 3.0, 4.0]


def test_fetched_rows_never_change() -> None:
    pool = HostPool(SPECS, 2)
    pool.store([[0, 1]], _rows(1.0, 2.0))
    _, given = pool.fetch([[1, 0]])
    pool.store([[0, 1]], _rows(3.0, 4.0))
    pool.store_arrived()
    assert _held(pool, 0) == [3.0] * 4
    assert given.tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ()),
        ({"enable_hierarchical_cache": True}, (200,)),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 0.5}, (50,)),
        ({"enable_hierarchical_cache": True, "hicache_size": 1e-6}, (100,)),
        ({"enable_hierarchical_cache": True, "hicache_host_memory_fraction": 0.5}, (80,)),
    ],
)
def test_number_of_host_pages(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert host_pages(EngineConfig(**settings), [100], [SPECS], 800) == expected  # a page is 10 bytes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"hicache_ratio": 0.5}, (50, 10)),
        ({"hicache_size": 1.2e-6}, (100, 20)),  # 1,200 bytes for what takes 100 and 20 pages of 10 bytes on the device
    ],
)
def test_groups_share_host_memory_in_proportion(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    config = EngineConfig(enable_hierarchical_cache=True, **settings)
    assert host_pages(config, [100, 20], [SPECS, SPECS]) == expected
    empty = [ArraySpec((1, 2, 0), np.dtype("f4"), (None,) * 3)]
    assert host_pages(config, [300, 120], [empty, SPECS])[0] >= 150, "pages of a group without layers cost nothing"
    HostPool(empty, 10).store([[0]], (jnp.zeros((1, 2, 0)),))


def test_impossible_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"hicache_ratio=0.001 is less than one page"):
        host_pages(EngineConfig(enable_hierarchical_cache=True, hicache_ratio=0.001), [100], [SPECS])
    memory = type("Memory", (), {"available": 1000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(ConfigError, match=r"hicache_ratio=2 comes to .* lower it to --hicache-ratio 0\.90"):
        host_pages(EngineConfig(enable_hierarchical_cache=True), [100], [SPECS])
    with pytest.raises(ConfigError, match=r"hicache_size=3 comes to .* lower it to --hicache-size"):
        host_pages(EngineConfig(enable_hierarchical_cache=True, hicache_size=3.0), [100], [SPECS])
