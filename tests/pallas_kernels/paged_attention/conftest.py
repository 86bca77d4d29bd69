"""What holds for every test of these kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_race(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Pallas' interpreters say on stdout that two accesses of memory race; only newer ones raise an error too."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
