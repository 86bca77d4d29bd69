from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.settings import as_flag
from jaxserve.observability import log
from tests import tiny_model


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of the tiny model, as arguments of `LLM`."""
    return tiny_model.tiny_settings(tmp_path_factory)


@pytest.fixture
def tiny_flags(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tiny model's settings as a command line; the logging of the test run stays as it is."""
    monkeypatch.setattr(log, "setup", lambda level: None)
    argv: list[str] = []
    for name, value in settings.items():
        argv += [as_flag(name), *map(str, value if isinstance(value, list) else [value])]
    return argv
