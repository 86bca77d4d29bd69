from pathlib import Path

import pytest

from jaxserve.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
PROFILES = {"cpu", "nvidia-l4", "nvidia-a100-80", "nvidia-h100", "nvidia-h200", "tpu-v5e", "tpu-v6e"}


def test_there_is_a_profile_for_each_device() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == PROFILES


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_profile_loads_strictly_under_our_own_names(name: str) -> None:
    loaded = load_config([], CONFIGS / f"{name}.yaml")
    assert loaded.engine.device == {"cpu": "cpu", "nvidia": "cuda", "tpu": "tpu"}[name.split("-")[0]]
    assert loaded.notes == ()
    assert all(value.alias is None for value in loaded.values)
