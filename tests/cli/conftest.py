from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.settings import as_flag
from jaxserve.observability import log
from tests import tiny_model


def as_argv(settings: dict[str, Any]) -> list[str]:
    """Return settings as a command line."""
    return [
        word
        for name, value in settings.items()
        for word in (as_flag(name), *map(str, value if isinstance(value, list) else [value]))
    ]


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of the tiny model, as arguments of `LLM`."""
    return tiny_model.tiny_settings(tmp_path_factory)


@pytest.fixture
def tiny_flags(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tiny model's settings as a command line; the logging of the test run isn't changed."""
    monkeypatch.setattr(log, "setup", lambda *given, **named: None)
    return as_argv(settings)
