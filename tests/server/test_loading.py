"""What a server says of a model that it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.client import Engine
from jaxserve.errors import ConfigError
from jaxserve.server.loading import load_model
from jaxserve.server.server_state import LoadedModel
from tests.server.fake_engine import FakeEngine
from tests.tiny_model import byte_tokenizer, write_tiny_model

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


async def load(folder: Path, *, engine: dict[str, Any] | None = None, **settings: Any) -> LoadedModel:
    loaded = await load_model(EngineConfig(model=str(folder), **(engine or {})), ServerConfig(**settings), Source())
    await loaded.chat_template.close()
    loaded.grammars.close()
    return loaded


async def test_the_defaults_of_sampling_come_with_the_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))

    assert (await load(tmp_path)).sampling_defaults.options == {"temperature": 0.6, "top_k": 20}
    changed = await load(tmp_path, generation_config="vllm", override_generation_config={"top_p": 0.5})
    assert changed.sampling_defaults.options == {"top_p": 0.5}
    with pytest.raises(ConfigError, match="generation_config=/nowhere"):
        await load(tmp_path, generation_config="/nowhere")


async def test_a_model_that_only_pools_has_no_defaults_of_sampling() -> None:
    loaded = await load(ENCODER, generation_config="/nowhere", override_generation_config={"temperature": 0.5})
    assert loaded.sampling_defaults.options == {}


async def test_another_tokenizer_is_loaded_with_its_template(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write_tiny_model(model)
    byte_tokenizer("<b>").save(str(other / "tokenizer.json"))
    (other / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<b>", "chat_template": "other"}))
    loaded = await load(model, engine={"tokenizer_path": str(other)})

    assert loaded.tokenizer.encode("<b>") == [256]
    assert loaded.template_source == "other"
