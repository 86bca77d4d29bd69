"""The sizes of a bidirectional model: steps of tokens, programs up to its longest text, and no pool."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source.pooling import ModelTask, PooledTask, Pooling
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory import InsufficientMemoryError
from pallas_kernels.target import CPU
from tests.test_encoders import ENCODER


def model(**fields: Any) -> ModelConfig:
    task = ModelTask(False, PooledTask(kind="embed", pooling=Pooling("cls"), size=64))
    return parse_model_config(ENCODER | fields, task=task)


def deployed(facts: DeviceFacts, max_position_embeddings: int = 512, **settings: Any) -> Deployment:
    return deploy(EngineConfig(**settings), model(max_position_embeddings=max_position_embeddings), facts)


FACTS = DeviceFacts(CPU, 2**30, max_devices=2)


def test_programs_hold_the_longest_text_and_steps_their_tokens() -> None:
    sizes = deployed(FACTS, 3000).sizes
    assert sizes.capacity.token_buckets == (16, 32, 64, 128, 256, 512, 1024, 2048, 3000)
    assert (sizes.chunked_prefill_size, sizes.capacity.max_model_len) == (512, 3000)
    assert (sizes.capacity.pages_by_group, sizes.pool_bytes, sizes.footprint.state) == ((), 0, 0)


def test_settings_bound_a_step_and_the_context() -> None:
    sizes = deployed(FACTS, chunked_prefill_size=64, max_prefill_tokens=48, context_length=40).sizes
    assert (sizes.chunked_prefill_size, sizes.capacity.max_model_len) == (48, 40)
    assert sizes.capacity.token_buckets == (16, 32, 48)
    whole = deployed(FACTS, chunked_prefill_size=-1, max_running_requests=7).sizes
    assert (whole.chunked_prefill_size, whole.capacity.num_slots) == (512, 7)


def test_all_programs_are_of_one_kind() -> None:
    keys = deployed(FACTS).program_keys
    assert [str(key) for key in keys] == [f"encode-{size}" for size in (16, 32, 64, 128, 256, 512)]


def test_a_model_that_does_not_fit_is_refused() -> None:
    small = DeviceFacts(CPU, 2**20, max_devices=1)
    with pytest.raises(InsufficientMemoryError, match="don't fit a device"):
        deployed(small)


def test_a_longer_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_length=513 is longer than the model's 512 tokens"):
        deployed(FACTS, context_length=513)


def test_ranks_are_taken_and_shards_are_not() -> None:
    assert deployed(FACTS, dp_size=2).capacity.num_ranks == 2
    with pytest.raises(ConfigError, match="set dp_size to use 2 devices"):
        deployed(FACTS, tp_size=2)
