import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.engine.startup import StartupTimes
from jaxserve.cli.bench import startup
from jaxserve.cli.main import main


def test_output_and_json_file(monkeypatch, tmp_path: Path, capsys) -> None:
    seen: list[dict[str, Any]] = []

    def start(flags: list[str], log: Path, *, timeout: float) -> StartupTimes:
        settings = json.loads(Path(flags[1]).read_text())
        cold = settings["program_cache_dir"] not in {one["program_cache_dir"] for one in seen}
        seen.append(settings)
        total = (20.0 if cold else 5.0) + len(seen)
        phases = {"imports": 2.0, "compile" if cold else "programs": total - 3.0, "engine": total - 1.0}
        return StartupTimes(total, 1.0, phases, 7, 7 * cold)

    monkeypatch.setattr(startup, "measure_startup", start)
    monkeypatch.setattr(startup, "fetch_files", lambda config: None)
    path = tmp_path / "result.json"
    counts = ["--num-cold", "2", "--num-warm", "3"]
    assert main(["bench", "startup", *counts, "--page-size", "32", "--output-json", str(path)]) == 0
    assert len(seen) == 5
    assert all(settings["page_size"] == 32 for settings in seen)
    assert not Path(seen[0]["program_cache_dir"]).exists()
    result = json.loads(path.read_text())
    assert result["settings"] == {"page_size": 32}
    assert result["cold"]["median"]["total"] == 21.5
    assert result["warm"]["median"]["total"] == 9.0
    assert [one["num_compiled_programs"] for one in result["warm"]["starts"]] == [0, 0, 0]
    text = capsys.readouterr().out
    assert "7 of 7 programs compiled in a cold start, 0 of 7 programs compiled in a warm start" in text
    [row] = [line.split()[-2:] for line in text.splitlines() if line.startswith("from the command")]
    assert row == ["21.50", "9.00"]
    [row] = [line.split()[-2:] for line in text.splitlines() if line.startswith("  programs: load")]
    assert row == ["-", "6.00"], "only a warm start loads programs"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-cold", "0"], "--num-cold must be at least 1"),
        (["--program-cache-dir", "x"], "--program-cache-dir is set by the benchmark itself"),
        (["--port", "8001"], "--port is set by the benchmark itself"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(flags: list[str], message: str, capsys) -> None:
    assert main(["bench", "startup", *flags]) == 2
    assert message in capsys.readouterr().err
