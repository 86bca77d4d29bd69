import json
from pathlib import Path

import pytest

from jaxserve.cli.main import main

RUN = ["bench", "throughput", "--num-prompts", "6", "--input-len", "10", "--output-len", "8"]


@pytest.mark.slow
def test_output_and_json_file(tiny_flags, tmp_path: Path, capsys) -> None:
    path = tmp_path / "new" / "result.json"
    assert main([*RUN, "--output-json", str(path), *tiny_flags]) == 0
    result = json.loads(path.read_text())
    assert result["num_requests"] == 6
    assert result["total_output_tokens"] == 48
    assert result["total_num_tokens"] == result["total_input_tokens"] + 48
    assert result["output_tokens_per_second"] == pytest.approx(48 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    text = capsys.readouterr().out
    assert f"{result['output_tokens_per_second']:.2f}" in text
    assert "random, 10 tokens in, 8 out" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset-name", "multi-turn"], "needs a server"),
        (["--dataset-name", "sharegpt"], "name it with --dataset-path"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--num-warmups", "-1"], "--num-warmups must be at least 0, got -1"),
        (["--page-size", "3"], "page_size must be a power of two"),
        (["--request-rate", "3"], "--request-rate is not a known flag"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(flags: list[str], message: str, capsys) -> None:
    assert main(["bench", "throughput", *flags]) == 2
    assert message in capsys.readouterr().err
