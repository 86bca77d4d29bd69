"""A sweep over real processes without a model."""

from __future__ import annotations

import csv
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.bench.results.run_file import read_runs
from tests.bench import stand_in

pytestmark = pytest.mark.process

GRID = """
base: {model: tiny}
engine: {max_running_requests: [8, 16]}
load: {dataset_name: random, num_prompts: 100, max_concurrency: [4, 8]}
repetitions: 2
"""


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def sweep(grid: Path, *flags: str) -> int:
    return stand_in.main(["sweep", str(grid), "--output", str(grid.parent / "out"), "--no-png", *flags])


def results(grid: Path) -> dict[str, int]:
    """Return the modification times of the results in the folder."""
    files = (grid.parent / "out" / "runs").glob("*.json")
    return {path.name: path.stat().st_mtime_ns for path in files}


def test_all_runs_and_their_summary(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(grid) == 0
    assert len(results(grid)) == 8
    out = grid.parent / "out"
    runs = {name: json.loads((out / "runs" / name).read_text()) for name in results(grid)}
    assert all(read_runs(out / "runs" / name)[0].completed == 100 for name in runs)
    first, second = (runs[f"engine-01.load-01.rep-{turn}.json"]["start_times"] for turn in (1, 2))
    assert first != second, "each repetition has a seed of its own"
    summary = json.loads((out / "summary.json").read_text())
    by_pair = {
        (row["settings"]["max_running_requests"], row["options"]["max_concurrency"]): row for row in summary["rows"]
    }
    rates = {pair: row["figures"]["output_throughput"] for pair, row in by_pair.items()}
    assert rates[16, 8] > 1.05 * rates[8, 8]
    assert all(row["runs"] == 2 and row["spreads"]["output_throughput"] > 0 for row in summary["rows"])
    best = [(summary["rows"][i]["engine"], summary["rows"][i]["load"]) for i in summary["pareto"]["median_ttft_ms"]]
    assert (1, 1) in best
    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["max_running_requests"] for row in rows] == ["8", "8", "16", "16"]
    assert float(rows[3]["output_throughput"]) == rates[16, 8]
    shown = capsys.readouterr().out
    assert "max_concurrency" in shown
    assert "failed" in shown


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.grid), signal.SIGKILL],
    ids=["SIGINT", "SIGKILL"],
)
def test_an_interrupted_sweep_is_resumed(grid: Path, number: signal.Signals) -> None:
    fifo = grid.parent / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "tests.bench.stand_in", "sweep", str(grid), "--output", str(grid.parent / "out")]
    with subprocess.Popen(
        [*command, "--no-png"], env=os.environ | {"STAND_IN_FIFO": str(fifo)}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            with fifo.open() as file:
                assert file.readline() == "half\n", "the third run has begun"
                process.send_signal(number)
                assert select.select([file], [], [], 60)[0], "server or load outlives the sweep"
                assert file.read() == "", "both are gone"
        except BaseException:
            process.kill()
            raise
        assert process.stderr is not None
        text = process.stderr.read()
    before = results(grid)
    assert sorted(before) == ["engine-01.load-01.rep-1.json", "engine-01.load-02.rep-1.json"]
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert "2 of 8 runs are done; the same command continues" in text
    assert sweep(grid) == 0
    after = results(grid)
    assert len(after) == 8
    assert before.items() <= after.items(), "what was done is not done again"


@pytest.mark.grid
def test_another_grid_is_refused_unless_fresh(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid.write_text(GRID.replace("repetitions: 2", ""))
    assert sweep(grid) == 0
    before = results(grid)
    grid.write_text(grid.read_text().replace("[4, 8]", "[4, 2]"))
    assert sweep(grid) == 2
    text = capsys.readouterr().err
    assert "loads 2.max_concurrency was 8 and is 2" in text
    assert "--fresh" in text
    assert results(grid) == before
    assert sweep(grid, "--dry-run") == 2
    assert sweep(grid, "--fresh") == 0
    assert not set(before.items()) & set(results(grid).items())


def test_failures_are_recorded_and_the_sweep_continues(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid.write_text("""
engine: {max_running_requests: [13, 8]}
load: {dataset_name: random, num_prompts: [13, 100, 14, 50]}
""")
    assert sweep(grid) == 1
    captured = capsys.readouterr()
    assert "can't start with 13" in captured.out
    assert "13 is no good number" in captured.out
    summary = json.loads((grid.parent / "out" / "summary.json").read_text())
    assert [row["runs"] for row in summary["rows"]] == [0, 0, 0, 0, 0, 1, 0, 1]
    assert "the server ended during the run" in summary["rows"][6]["reasons"][0]
    assert summary["rows"][7]["runs"] == 1, "the load after the server's end had another server"
    assert len(summary["rows"][0]["reasons"]) == 1


def test_a_dry_run_lists_the_runs_and_starts_nothing(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(grid, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "jaxserve serve --model tiny --max-running-requests 16" in text
    assert "engine-02.load-02.rep-2  to do   jaxserve bench serve --dataset-name random" in text
    assert "8 runs to do" in text
    assert not (grid.parent / "out").exists()


def test_a_folder_is_locked_by_one_sweep(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    out = grid.parent / "out"
    out.mkdir()
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(grid) == 2
    assert "another sweep is running" in capsys.readouterr().err


def test_a_folder_without_sweep_json_is_not_touched(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = grid.parent / "out" / "runs" / "engine-01.json"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert sweep(grid, "--fresh") == 2
    assert "no sweep.json that identifies their sweep" in capsys.readouterr().err
    assert precious.exists()


def test_png(grid: Path) -> None:
    pytest.importorskip("matplotlib")
    grid.write_text("load: {dataset_name: random, num_prompts: 20, max_concurrency: [1, 2]}")
    assert stand_in.main(["sweep", str(grid), "--output", str(grid.parent / "out")]) == 0
    assert (grid.parent / "out" / "plots.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_names_the_extra(grid: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from jaxserve.cli.main import main; sys.exit(main(['bench', 'sweep', {str(grid)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=grid.parent)
    assert done.returncode == 2
    assert "pip install 'jaxserve[bench]'" in done.stderr
    assert not (grid.parent / "grid-sweep").exists()
