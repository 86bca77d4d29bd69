from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.runtime.sizing.capacity_report import report_capacity


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"tp_size": 3, "pp_size": 2}, 6),
        ({"dp_size": 2, "pp_size": 2, "dp_mode": "mesh"}, 4),
        ({"dp_size": 4, "pp_size": 2, "dp_mode": "replicas"}, 8),
    ],
)
def test_a_report_counts_the_devices_of_all_stages_and_replicas(sizes: dict[str, Any], count: int) -> None:
    config = EngineConfig(model="smollm2-135m-instruct", load_format="dummy", **sizes)
    assert report_capacity(config, "nvidia-h200").num_devices == count
