from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxserve.bench.sweep.grid import Grid, GridRun, read_grid
from jaxserve.cli.bench import serve
from jaxserve.errors import ConfigError

SWEEPING = Path(__file__).parents[3] / "docs" / "sweeping.md"


def grid_of(folder: Path, text: str) -> Grid:
    path = folder / "grid.yaml"
    path.write_text(text)
    return read_grid(path, serve.parser().parse)


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", SWEEPING.read_text(encoding="utf-8"), flags=re.S)
    assert found is not None
    grid = grid_of(tmp_path, found[1])
    assert (len(grid.engines), len(grid.loads), len(grid.runs())) == (6, 3, 54)
    assert grid.serve_flags(1) == [
        *("--model", "smollm2-135m-instruct", "--context-length", "1024"),
        *("--max-running-requests", "8", "--cuda-graph-bs", "1", "4", "32"),
    ]
    assert "--cuda-graph-bs" not in grid.serve_flags(0)


def test_each_repetition_has_its_own_seed_and_loads_take_turns(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "load: {max_concurrency: [1, 2], seed: 7}\nrepetitions: 2")
    assert grid.runs() == [GridRun(0, 0, 1), GridRun(0, 1, 1), GridRun(0, 0, 2), GridRun(0, 1, 2)]
    assert [grid.load_flags(run)[-1] for run in grid.runs()] == ["7", "7", "8", "8"]


def test_a_list_of_grids(tmp_path: Path) -> None:
    text = """
engine: [{max_running_requests: 4}, {max_running_requests: 8, disable_radix_cache: [true, false]}]
load: [{request_rate: [1, 2]}, {max_concurrency: 4, ignore_eos: true, goodput: [["ttft:200", "tpot:50"]]}]
"""
    grid = grid_of(tmp_path, text)
    assert [grid.serve_flags(i) for i in range(3)] == [
        ["--max-running-requests", "4"],
        ["--max-running-requests", "8", "--disable-radix-cache"],
        ["--max-running-requests", "8", "--no-disable-radix-cache"],
    ]
    flags = grid.load_flags(GridRun(0, 2, 1))
    assert flags == ["--max-concurrency", "4", "--ignore-eos", "--goodput", "ttft:200", "tpot:50", "--seed", "0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("load: {max_concurrency: 1}\nrepetition: 2", "did you mean repetitions"),
        ("engine: {max_running_requests: 4}", "there is no load"),
        ("load: {max_concurency: 1}", "did you mean --max-concurrency"),
        ("load: {max_concurrency: many}", "max-concurrency"),
        ("load: {max_concurrency: []}", "empty list"),
        ("load: {base_url: x}", "set by the sweep itself"),
        ("base: {port: 1}\nload: {max_concurrency: 1}", "base.port is set by the sweep itself"),
        ("engine: {max_runing_requests: 4}\nload: {max_concurrency: 1}", "did you mean max_running_requests"),
        ("engine: {page_size: [16, 17]}\nload: {max_concurrency: 1}", "power of two"),
        ("engine: {cuda_graph_bs: [1, 8]}\nload: {max_concurrency: 1}", "lists of lists"),
        ("load: {max_concurrency: 1}\nrepetitions: 0", "whole number of at least 1"),
        ("load: {max_concurrency: 1}\nrun_timeout: soon", "seconds above 0"),
        ("load: [1]", "mapping of options"),
        ("[1]", "must be a mapping"),
        ("load: {", "not valid YAML"),
    ],
)
def test_invalid_files_are_refused_before_anything_runs(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        grid_of(tmp_path, text)
