from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.execution.host_memory import plan_host_memory
from jaxserve.runtime.sizing.deployment import deploy
from pallas_kernels.paged_attention import KernelTarget
from tests.runtime.tiny import model

GPU, CPU = (DeviceFacts(KernelTarget(platform), 2**30, max_devices=4) for platform in ("cuda", "cpu"))
FREE = 2**26
NODES = {"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}


def _host_bytes(device: DeviceFacts, **settings: Any) -> tuple[int, int]:
    """Return the bytes of all host memory of an engine, and those that it needs on one of its devices."""
    config = EngineConfig(
        enable_hierarchical_cache=True, hicache_host_memory_fraction=0.5, max_total_tokens=4096, **settings
    )
    made = deploy(config, model(), device)
    host = plan_host_memory(config, made, FREE)
    [rows] = host.rows
    [page_bytes] = [sum(spec.nbytes // spec.shape[1] for spec in group) for group in rows]
    return host.pages[0] * page_bytes, made.sizes.footprint.non_pool + made.sizes.pool_bytes


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.5),
        ({"dp_size": 2, "dp_mode": "mesh"}, 0.5),
        ({"dp_size": 2, "dp_mode": "replicas"}, 0.25),  # of one of two engines
        ({"tp_size": 2, **NODES}, 1.0),  # of both nodes
    ],
)
def test_all_that_runs_on_a_host_has_a_share_of_its_memory(settings: dict[str, Any], share: float) -> None:
    assert _host_bytes(GPU, **settings)[0] == pytest.approx(share * FREE, rel=0.01)


def test_the_model_and_its_cache_take_memory_of_a_cpu() -> None:
    found, on_device = _host_bytes(CPU, tp_size=2)
    assert on_device > 0.01 * FREE
    assert found == pytest.approx(0.5 * (FREE - 2 * on_device), rel=0.001)
