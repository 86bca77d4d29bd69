"""`benchmarks/device.py`: a failed section is reported and the others go on; the dry run ends with a table."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
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


PLANTED = """
import threading

def rates(run):
    run.row("device", 1, "", note="Some GPU")

def error(run):
    run.row("before an error", 1, "")
    raise ValueError("planted")

def memory(run):
    run.row("before all memory is asked for", 1, "")
    bytearray(1 << 60)

def hang(run):
    run.row("before it hangs", 1, "")
    threading.Event().wait()

def parts(run):
    if run.part:
        run.row(f"of {run.part}", 1, "")
        error(run) if run.part == "wrong" else None
    else:
        run.in_processes(["wrong", "right"])

def cases(run):
    run.compare("cases", {"right": lambda: None, "wrong": lambda: "error 3", "broken": lambda: 1 // 0}, refused=4)

def last(run):
    run.row("after all", 1, "")
"""
_PLANTED_SECONDS = {"error": 20, "memory": 20, "hang": 5, "parts": 30, "cases": 20, "last": 20}


def test_rows_of_other_sections_survive_an_error_a_hang_and_the_end_of_memory(tmp_path: Path) -> None:
    """Sections with these faults stand in place of the benchmark's own."""
    copied = shutil.copytree(SCRIPT.parent, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results"))
    (copied / "device_sections" / "machine.py").write_text(PLANTED)
    sections = "".join(f'"machine.{name}": {seconds}, ' for name, seconds in _PLANTED_SECONDS.items())
    source, count = re.subn(r"(?s)^SECTIONS = {\n.*?^}", f"SECTIONS = {{RATES: 20, {sections}}}", SCRIPT.read_text(),
                            flags=re.M)  # fmt: skip
    assert count == 1
    (copied / "device.py").write_text(source)
    argv = [sys.executable, str(copied / "device.py"), "--minutes", "2", "--cache", str(tmp_path / "programs")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    folder = copied / "results" / "some-gpu"
    found = json.loads((folder / "device.json").read_text())
    assert found["done"] == ["machine.rates", "machine.cases", "machine.last"]
    faults = {fault["section"].removeprefix("machine."): fault["fault"] for fault in found["faults"]}
    assert faults["error"] == "exit code 1: ValueError: planted"
    assert faults["memory"] == "exit code 1: MemoryError"
    assert re.fullmatch(r"ended after \d+ s", faults["hang"])
    assert faults["parts"] == "exit code 1: RuntimeError: parts that failed, with their exit codes: wrong (1)"
    rows = {row["name"]: row for row in found["rows"]}
    assert {"before an error", "before all memory is asked for", "before it hangs", "after all"} <= rows.keys()
    assert {"of wrong", "of right"} <= rows.keys(), "each part in a process of its own"
    right = rows["cases: cases right"]
    assert (right["value"], right["reference"], right["note"]) == (1, 3, "4 refused, 0 not tried")
    wrong = [row["note"] for row in found["rows"] if row["name"] == "cases: wrong"]
    assert sorted(wrong) == ["broken: ZeroDivisionError: integer division or modulo by zero", "wrong: error 3"]
    log = (folder / "sections.log").read_text()
    assert "ValueError: planted" in log
    assert re.search(r"machine\.py\", line \d+ in hang", log), "where it hangs"


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

    def section(name: str, command: list[str], *_: Any) -> str | None:
        ran.append(name)
        rows = Path(command[command.index("--rows") + 1])
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
    first_of_all = ["machine.rates", "kernels.correctness", "engine.llama_3_1_8b", "engine.llama_3_1_8b_fp8"]
    assert first["ran"][:4] == first_of_all
    assert first["faults"] == [{"section": "kernels.decode", "fault": "it failed"}]
    assert "peer.transformers" in first["done"], "these sections take no time"
    second = run("--minutes", "9", "--resume")
    assert second["ran"] == ["machine.rates", "kernels.decode"]
    assert second["faults"] == []
    assert sorted(second["done"]) == sorted(first["ran"])
    values = {row["section"]: row["value"] for row in second["rows"]}
    assert (values["kernels.decode"], values["kernels.correctness"]) == (2, 2), "the new row, and the kept one"
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
    half = needs["kernels.decode"] / (needs["kernels.decode"] + needs["kernels.prefill"])
    assert limit("kernels.decode", ["kernels.prefill"], 1300.0) == pytest.approx(1300 * half), "divided alike"
    assert limit("kernels.decode", ["engine.llama_3_1_8b"], 80.0) == needs["kernels.decode"]
    first_call = list(needs)[:4]
    assert first_call == ["machine.rates", "kernels.correctness", "engine.llama_3_1_8b", "engine.llama_3_1_8b_fp8"]
    assert sum(needs[name] for name in first_call) <= 498
    assert limit("engine.gpt_oss_20b", ["kernels.decode"], 162.0 - needs["machine.rates"]), "in a second call"


@pytest.mark.grid
def test_a_dry_run_of_everything(tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "--interpret-tiny", "--minutes", "20", "--results", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "A DRY RUN, NO FIGURE WAS MEASURED" in done.stdout
    assert "FAILED" not in done.stdout
    assert not list(tmp_path.iterdir())
    assert json.dumps("Llama-3.1-8B offline 16/8: output")[1:-1] in done.stdout
