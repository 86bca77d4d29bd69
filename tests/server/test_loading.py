"""What a server says of a model that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.client import Engine
from jaxserve.errors import ConfigError
from jaxserve.server.loading import load_model
from jaxserve.text.chat_template import ChatTemplate
from tests.server.fake_engine import FakeEngine
from tests.tiny_model import write_tiny_model

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


class TemplateHere:
    """A chat template that is rendered in this process."""

    def __init__(self, *given: Any, content_format: Any) -> None:
        self._template = ChatTemplate(*given, content_format)

    async def start(self) -> None: ...

    async def turn_end(self) -> str:
        return self._template.turn_end()

    async def render(self, messages: Any, **arguments: Any) -> str:
        return self._template.render(messages, **arguments)

    async def close(self) -> None: ...


async def test_the_template_gets_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.text.template_process.TemplateProcess", TemplateHere)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content is string }} {{ mood }}")
    settings: dict[str, Any] = {"chat_template": str(tmp_path / "chat.jinja"), "chat_template_content_format": "openai"}
    model = EngineConfig(model=str(write_tiny_model(tmp_path)))
    loaded = await load_model(model, ServerConfig(default_chat_template_kwargs={"mood": "calm"}, **settings), Source())
    assert loaded.template_defaults == {"mood": "calm"}
    shown = await loaded.chat_template.render([{"role": "user", "content": "x"}], **loaded.template_defaults)
    assert shown == "False calm"
    for name in ("mod", "tools"):
        with pytest.raises(ConfigError, match=rf"default_chat_template_kwargs\.{name}"):
            await load_model(model, ServerConfig(default_chat_template_kwargs={name: 1}, **settings), Source())
    with pytest.raises(ConfigError, match="no chat template"):
        await load_model(
            EngineConfig(model=str(ENCODER)), ServerConfig(default_chat_template_kwargs={"a": 1}), Source()
        )
