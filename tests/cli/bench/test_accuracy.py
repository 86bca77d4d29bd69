"""`jaxserve bench accuracy`: its table, its file and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from tests.bench.accuracy.bigram_server import BigramServer, bigram_table, serving
from tests.tiny_model import write_tiny_model


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    return str(path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    return str(write_tiny_model(folder))


def test_two_running_servers(text: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "result.json"
    with serving(BigramServer(bigram_table(1))) as base, serving(BigramServer(bigram_table(2))) as other:
        assert main([
            "bench", "accuracy", "--text", text, "--tokenizer", tokenizer, "--window", "16", "--max-windows", "20",
            "--base", base, "--other", other, "--output-json", str(path),
        ]) == 0  # fmt: skip
    found = json.loads(path.read_text())
    assert (found["base"], found["other"]) == ({"url": base}, {"url": other})
    assert (found["num_windows"], found["num_scored_tokens"]) == (20, 300)
    ratio = found["perplexity_ratio"]
    assert ratio["value"] == pytest.approx(found["other_perplexity"]["value"] / found["base_perplexity"]["value"])
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert found["kl_divergence"]["value"] > 0.001
    assert found["compared_probability"]["value"] < 0.5, "the two tables have little in common"
    assert found["top1_agreement"]["value"] < 0.5
    shown = capsys.readouterr().out
    for words in (f"base:  {base}", f"other: {other}", "360 tokens; 300 of them scored in 20 windows of 16",
                  f"{ratio['value']:.5f}", "95% within", "a lower bound"):  # fmt: skip
        assert words in shown


@pytest.mark.process
def test_servers_that_it_starts(
    text: str, tiny_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert main([
        "bench", "accuracy", "--text", text, "--window", "32", "--other", "--random-seed 1",
        "--output-json", str(path), "--page-size", "16", *tiny_flags,
    ]) == 0  # fmt: skip
    found = json.loads(path.read_text())
    assert found["base"]["settings"]["page_size"] == 16
    assert found["other"]["settings"] == found["base"]["settings"] | {"random_seed": 1}
    assert found["num_scored_tokens"] == 11 * 31
    assert found["base_perplexity"]["value"] > 100, "random weights know nothing"
    assert found["top1_agreement"]["value"] < 0.5
    assert found["kl_divergence"]["value"] > 0.001
    assert "jaxserve serve --random-seed 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --other"),
        (["--other", "--page-size 3"], "--other '--page-size 3': page_size must be a power of two"),
        (["--other", "--no-such-flag 3"], "--no-such-flag is not a known flag"),
        (["--other", "--dtype 'bfloat16"], '--other "--dtype \'bfloat16": No closing quotation'),
        (["--other", "ftp://x"], "--other 'ftp://x' must be like http://127.0.0.1:8000"),
        (["--base", "http://a", "--other", "http://b", "--page-size", "16"], "page_size would have no effect"),
        (["--other", "", "--window", "1"], "--window must be at least 2 tokens"),
        (["--other", "", "--max-concurrency", "0"], "--max-concurrency must be above 0, got 0"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(
    text: str, tokenizer: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "accuracy", "--text", text, "--tokenizer", tokenizer, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_text_that_is_too_short(text: str, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", "--text", text, "--tokenizer", tokenizer, "--other", ""]) == 2
    assert "has 360 tokens, fewer than one window of 512" in capsys.readouterr().err


def test_no_server_answers(text: str, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(BigramServer(bigram_table(1))) as url:
        pass
    flags = ["--window", "16", "--tokenizer", tokenizer, "--base", url, "--other", url]
    assert main(["bench", "accuracy", "--text", text, *flags]) == 1
    assert url in capsys.readouterr().err
