from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from tests.bench.result_files import serve_result, written


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [written(tmp_path / f"{name}.json", serve_result(i, itl=0.02 + 0.005 * i)) for i, name in enumerate("ab")]


def test_two_files(files: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert main(["bench", "compare", *files, "--output-json", str(output)]) == 0
    text = capsys.readouterr().out
    assert "slower" in text
    assert "One run a side" in text
    content = json.loads(output.read_text())
    assert {row["metric"] for row in content["metrics"] if row["verdict"] == "slower"} >= {"median_tpot_ms"}


def test_the_exit_code_says_whether_there_is_a_regression(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", *files, "--fail-on-regression", "5"]) == 1
    assert "REGRESSION: " in capsys.readouterr().out
    assert main(["bench", "compare", *files, "--fail-on-regression", "90"]) == 0
    assert main(["bench", "compare", files[1], files[0], "--fail-on-regression", "5"]) == 0
    assert main(["bench", "compare", *files, "--fail-on-regression", "5", "--metrics", "median_ttft_ms"]) == 0


def test_patterns_select_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(6):
        written(tmp_path / f"{'ab'[i // 3]}-{i}.json", serve_result(i, itl=0.02 + 0.002 * (i // 3)))
    sides = ["--a", str(tmp_path / "a-*.json"), "--b", *(str(tmp_path / f"b-{i}.json") for i in range(3, 6))]
    assert main(["bench", "compare", *sides]) == 0
    text = capsys.readouterr().out
    assert "slower" in text
    assert "One run a side" not in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "nothing to compare"),
        (["one.json"], "got 1 files"),
        (["--a", "nothing-*.json", "--b", "x"], "as a pattern it matches none"),
        (["{a}", "{b}", "--confidence", "2"], "--confidence must be in"),
        (["{a}", "{b}", "--metrics", "mean_ttf_ms"], "did you mean mean_ttft_ms"),
        (["{a}", "{b}", "--fail-on-regression", "-1"], "at least 0 percent"),
        (["{a}", "{b}", "--output-json", "/no/such/folder/x.json"], "can't be written"),
    ],
)
def test_user_errors(files: list[str], argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", *(item.format(a=files[0], b=files[1]) for item in argv)]) == 2
    assert says in capsys.readouterr().err
