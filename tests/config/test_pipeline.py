from __future__ import annotations

import pytest

from jaxserve.config.load import GivenSetting, load_config
from jaxserve.config.pipeline import layer_partition
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError


@pytest.mark.parametrize(
    ("stages", "text", "partition"),
    [
        (1, "memory", "memory"),
        (3, "memory", "memory"),
        (3, "layers", "layers"),
        (3, "7,8,8", (7, 8, 8)),
        (2, " 20 , 1", (20, 1)),
        (1, "24", (24,)),
    ],
)
def test_layers_are_divided_by_memory_evenly_or_as_listed(stages: int, text: str, partition: object) -> None:
    assert layer_partition(EngineConfig(pp_size=stages, pp_layer_partition=text)) == partition


def test_stages_have_as_many_layers_unless_the_setting_says_otherwise() -> None:
    assert layer_partition(EngineConfig(pp_size=2)) == "layers"


@pytest.mark.parametrize("text", ["", "even", "Memory", "0,8", "8,-1", "8,,8", "8,8,", "8;8", "8.0,8", "٣,٤", "1" * 9])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(pp_size=2, pp_layer_partition=text)
    assert str(caught.value).startswith("pp_layer_partition must be memory, layers, or the number of layers of each")
    assert str(caught.value).endswith(f"got {text!r}")


@pytest.mark.parametrize(("stages", "text", "count"), [(2, "8,8,8", 3), (3, "8,8", 2), (1, "8,8", 2), (2, "8", 1)])
def test_each_stage_needs_a_number(stages: int, text: str, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"={text} needs pp_size={count}, .* and pp_size is {stages}: change"):
        EngineConfig(pp_size=stages, pp_layer_partition=text)


def test_flags() -> None:
    given = {"pp_size": "2", "pp_layer_partition": "20,22"}
    flags = [GivenSetting(name, text, "flag", f"--{name}") for name, text in given.items()]
    assert layer_partition(load_config(flags).engine) == (20, 22)
