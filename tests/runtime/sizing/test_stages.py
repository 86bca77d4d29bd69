"""How layers are divided among pipeline stages."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import axis_sizes
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import InsufficientMemoryError
from jaxserve.runtime.sizing.stages import divide_by_weight, divide_layers
from pallas_kernels.paged_attention import KernelTarget
from tests.models.golden import golden_config
from tests.tiny_model import CONFIG

F32 = np.dtype(np.float32)


def _sizes(layers: int, stages: int, partition: str, **fields: Any) -> list[int]:
    model = LaidOutModel(parse_model_config(CONFIG | {"num_hidden_layers": layers} | fields))
    config = EngineConfig(pp_size=stages, pp_layer_partition=partition)
    found = divide_layers(config, model, abstract_params(model, F32), axis_sizes())
    assert [stage.index for stage in found] == list(range(stages))
    assert [stage.first for stage in found] == [0, *(stage.end for stage in found[:-1])]
    assert found[-1].end == layers
    return [stage.end - stage.first for stage in found]


def _deploy(memory: int = 2**34, **settings: Any) -> Deployment:
    device = DeviceFacts(KernelTarget("cpu"), memory, max_devices=8)
    config = EngineConfig(dtype="float32", pp_size=2, pp_layer_partition="3,1", **settings)
    return deploy(config, parse_model_config(CONFIG | {"num_hidden_layers": 4}), device)


def test_layers_are_divided_evenly_or_as_asked() -> None:
    assert _sizes(8, 4, "layers") == [2, 2, 2, 2]
    assert _sizes(10, 4, "layers") == [2, 3, 3, 2]
    assert _sizes(11, 4, "layers") == [3, 3, 3, 2]
    assert _sizes(8, 3, "1,5,2") == [1, 5, 2]


def test_memory_counts_the_embedding_and_the_head() -> None:
    # The embedding weighs as much as several layers, and is with the first stage and as the head with the last one.
    assert _sizes(12, 4, "memory", vocab_size=CONFIG["vocab_size"] * 16) == [1, 5, 5, 1]
    assert _sizes(12, 2, "memory", tie_word_embeddings=False) == [6, 6]


def test_no_division_has_a_lighter_stage() -> None:
    rng = random.Random(0)
    for _ in range(200):
        weights = [rng.choice([1, 2, 3, 10]) for _ in range(rng.randint(1, 9))]
        count = rng.randint(1, len(weights))
        heaviest = []
        for cuts in itertools.combinations(range(1, len(weights)), count - 1):
            ends = [0, *cuts, len(weights)]
            heaviest.append(max(sum(weights[start:end]) for start, end in itertools.pairwise(ends)))
        sizes = divide_by_weight(weights, count)
        ends = [0, *itertools.accumulate(sizes)]
        assert len(sizes) == count
        assert min(sizes) > 0
        assert max(sum(weights[start:end]) for start, end in itertools.pairwise(ends)) == min(heaviest)


@pytest.mark.parametrize(
    ("layers", "stages", "partition", "says"),
    [
        (4, 5, "memory", "pp_size=5 is more than the 4 layers of the model; lower --pp-size"),
        (
            4,
            2,
            "3,2",
            "pp_layer_partition=3,2 has 5 layers, and the model 4; name the layers of each stage, such as 2,2",
        ),
    ],
)
def test_what_can_not_be_divided_is_refused(layers: int, stages: int, partition: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _sizes(layers, stages, partition)


def test_layers_that_share_values_are_refused_by_name() -> None:
    model = LaidOutModel(golden_config("gemma4"))
    with pytest.raises(ConfigError, match="pp_size=2: layers of this model use vectors, or keys and values"):
        divide_layers(EngineConfig(pp_size=2), model, abstract_params(model, F32), axis_sizes())
    larger = LaidOutModel(golden_config("gemma4_moe"))
    divide_layers(EngineConfig(pp_size=2), larger, abstract_params(larger, F32), axis_sizes())


def test_all_stages_have_the_capacity_of_the_fullest_one() -> None:
    made = _deploy()
    first, last = made.stages
    assert first.capacity == last.capacity == made.capacity
    assert made.capacity.num_stages == 2
    assert [spec.num_layers for part in made.stages for spec in part.kv_specs] == [3, 1]
    assert first.sizes.footprint.weights > last.sizes.footprint.weights
    assert made.sizes.footprint == first.sizes.footprint
    assert first.state.counts is None
    assert last.state.counts is not None
    assert not any(key.greedy or key.kind in ("draw", "adjust") for key in first.program_keys)
    assert {key for key in last.program_keys if not key.greedy} > set(first.program_keys)


def test_a_stage_without_room_is_named() -> None:
    made = _deploy()
    needed = made.stages[1].sizes.footprint
    memory = int((needed.weights + needed.state + needed.activations + 2**16) / 0.88)
    with pytest.raises(InsufficientMemoryError, match="stage 0 of 2, with layers 0 to 2: no memory is left"):
        _deploy(memory)
