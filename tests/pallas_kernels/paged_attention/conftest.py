"""A check after every test of these kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_race(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Pallas' interpreters report races of memory accesses on stdout; only newer ones also raise an error."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
