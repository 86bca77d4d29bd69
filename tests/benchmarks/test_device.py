"""`benchmarks/device.py`: a failed section is reported and the others go on; the dry run ends with a table."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
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
    row = {
        "section": "kernels",
        "name": "decode",
        "value": 3200.0,
        "unit": "GB/s",
        "reference": 4000.0,
        "goal": 0.8,
        "predicted": 3500.0,
    }
    script["print_table"]("NVIDIA H200", [{**row, "note": ""}], [{"section": "engine", "fault": "exit code 1"}], False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "NVIDIA H200"
    assert lines[3].split() == ["kernels", "decode", "3,200", "GB/s", "4,000", "0.80", "0.8", "3,500"]
    assert lines[4].split() == ["engine", "FAILED:", "exit", "code", "1"]


@pytest.fixture
def run(script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run the command with sections that only write a row each; return the JSON, with the sections under `ran`."""
    names = script["run_all"].__globals__
    ran: list[str] = []

    def section(name: str, rows: Path, seconds: float, tiny: bool, environment: dict[str, str]) -> str | None:
        ran.append(name)
        about = {"section": name, "value": len(ran), "unit": "", "reference": None, "goal": None, "predicted": 2.0}
        what = {"name": "device", "note": "Some GPU"} if name == "machine.rates" else {"name": "rate", "note": ""}
        with rows.open("a") as file:
            file.write(json.dumps({**about, **what}) + "\n")
        return "it failed" if name == failing else None

    failing = ""
    monkeypatch.setitem(names, "one_section", section)

    def run(*argv: str, fails: str = "") -> dict[str, Any]:
        nonlocal failing
        failing = fails
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["device.py", "--results", str(tmp_path), *argv])
        script["main"]()
        return json.loads((tmp_path / "some-gpu" / "device.json").read_text()) | {"ran": list(ran)}

    return run


def test_a_further_call_runs_the_sections_that_are_left(run: Callable[..., dict[str, Any]]) -> None:
    first = run("--minutes", "9", fails="kernels.decode")
    assert first["ran"][:3] == ["machine.rates", "options.steps", "kernels.correctness"]
    assert first["faults"] == [{"section": "kernels.decode", "fault": "it failed"}]
    assert "peer.transformers" in first["done"], "these sections take no time"
    second = run("--minutes", "9", "--resume")
    assert second["ran"] == ["machine.rates", "kernels.decode"]
    assert second["faults"] == []
    assert sorted(second["done"]) == sorted(first["ran"])
    values = {row["section"]: row["value"] for row in second["rows"]}
    assert (values["kernels.decode"], values["options.steps"]) == (2, 2), "the new row, and the kept one"
    assert len(second["rows"]) == len(values)


def test_other_sources_are_not_resumed(run: Callable[..., dict[str, Any]], script: dict[str, Any]) -> None:
    run("--only", "kernels.decode")
    names = script["run_all"].__globals__
    names["sources"] = lambda: "other"
    assert run("--only", "kernels.decode", "--resume")["ran"] == ["machine.rates", "kernels.decode"]


def test_the_json_is_there_after_every_section(
    run: Callable[..., dict[str, Any]], script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = script["run_all"].__globals__
    section = names["one_section"]

    def interrupted(name: str, *rest: Any) -> str | None:
        if name == "kernels.prefill":
            raise KeyboardInterrupt
        return section(name, *rest)

    monkeypatch.setitem(names, "one_section", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("--only", "kernels.decode", "kernels.prefill")
    assert json.loads((tmp_path / "some-gpu" / "device.json").read_text())["done"] == [
        "machine.rates",
        "kernels.decode",
    ]


def test_a_section_without_enough_time_is_left_to_another_call(script: dict[str, Any]) -> None:
    needs, limit = script["SECTIONS"], script["time_limit"]
    assert limit("engine.llama_3_1_8b", [], needs["engine.llama_3_1_8b"] / 2) is None
    assert limit("kernels.decode", ["kernels.prefill"], 1300.0) == 700.0, "time beyond the need is divided alike"
    assert limit("kernels.decode", ["engine.llama_3_1_8b"], 80.0) == 70.0
    first_call = ["machine.rates", "options.steps", "kernels.correctness", "kernels.decode", "kernels.prefill"]
    assert list(needs)[:5] == first_call
    assert sum(needs[name] for name in first_call) <= 9 * 60


@pytest.mark.grid
def test_a_dry_run_of_everything(tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "--interpret-tiny", "--minutes", "20", "--results", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "A DRY RUN, NO FIGURE WAS MEASURED" in done.stdout
    assert "FAILED" not in done.stdout
    assert not list(tmp_path.iterdir())
    assert json.dumps("Llama-3.1-8B offline 16/8: output")[1:-1] in done.stdout
