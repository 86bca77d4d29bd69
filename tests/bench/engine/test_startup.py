"""Starts of a real server process, with a fake device that takes no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxserve.bench.engine.startup import measure_startup
from jaxserve.errors import BenchRunError

FAKE = (sys.executable, "-m", "tests.e2e.fake_device", "serve", "--model", "fake")

pytestmark = pytest.mark.slow


@pytest.mark.process
def test_startup_by_phase(tmp_path: Path) -> None:
    start = measure_startup([], tmp_path / "log", timeout=120, command=FAKE)
    assert start.num_compiled_programs == 0
    assert 0 < start.engine["imports"] <= start.engine["engine"] < start.total
    assert start.api == pytest.approx(start.total - start.engine["engine"])


@pytest.mark.process
def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(BenchRunError, match="before it was ready"):
        measure_startup(["--page-size", "3"], tmp_path / "log", timeout=120, command=FAKE)
