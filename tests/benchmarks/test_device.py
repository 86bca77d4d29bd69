"""`benchmarks/device.py`: a failed section is reported and the others go on; the dry run ends with a table."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(SCRIPT))


def test_a_failed_section_is_reported_with_its_last_line(script: dict[str, Any], tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "rows.jsonl"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    fault = script["one_section"]("machine.rates", nowhere, 120, True, environment)
    assert fault is not None
    assert fault.startswith("exit code 1: FileNotFoundError")
    assert script["one_section"]("machine.rates", nowhere, 0.5, True, environment) == "no time was left"


def test_a_hanging_section_is_killed(script: dict[str, Any], tmp_path: Path) -> None:
    fifo = tmp_path / "rows.jsonl"
    os.mkfifo(fifo)  # opening it for writing waits for a reader that never comes
    fault = script["one_section"]("machine.rates", fifo, 8, True, os.environ | {"JAX_PLATFORMS": "cpu"})
    assert fault == "ended after 8 s"


def test_the_table_shows_ratios_and_faults(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    row = {"section": "kernels", "name": "decode", "value": 3200.0, "unit": "GB/s", "reference": 4000.0, "goal": 0.8}
    script["print_table"]("NVIDIA H200", [{**row, "note": ""}], [{"section": "engine", "fault": "exit code 1"}], False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "NVIDIA H200"
    assert lines[3].split() == ["kernels", "decode", "3,200", "GB/s", "4,000", "0.80", "0.8"]
    assert lines[4].split() == ["engine", "FAILED:", "exit", "code", "1"]


@pytest.mark.grid
def test_a_dry_run_of_everything(tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "--interpret-tiny", "--minutes", "20", "--results", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "A DRY RUN, NO FIGURE WAS MEASURED" in done.stdout
    assert "FAILED" not in done.stdout
    assert not list(tmp_path.iterdir())
    assert json.dumps("Llama-3.1-8B offline 16/8: output")[1:-1] in done.stdout
