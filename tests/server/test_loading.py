"""What a server says of a model that it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.client import Engine
from jaxserve.errors import ConfigError
from jaxserve.server.loading import load_model
from tests.server.fake_engine import FakeEngine

ENCODER = Path(__file__).parents[1] / "fixtures" / "pooled" / "bert_mean"


class Source:
    async def fetch_model(self) -> None: ...

    async def start_engine(self) -> Engine:
        return FakeEngine(100)


async def test_only_a_model_that_generates_calls_tools(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loaded = await load_model(EngineConfig(model=str(ENCODER)), ServerConfig(), Source())
    assert not loaded.task.generates
    assert "calls of tools" not in caplog.text


@pytest.mark.process
async def test_a_pattern_of_blanks_that_is_not_valid_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="constrained_json_whitespace_pattern can't be used"):
        await load_model(
            EngineConfig(model=str(ENCODER)), ServerConfig(constrained_json_whitespace_pattern="("), Source()
        )
