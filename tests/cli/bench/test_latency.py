import json
from pathlib import Path

import pytest

from jaxserve.cli.main import main

BATCH = ["bench", "latency", "--batch-size", "3", "--input-len", "8", "--output-len", "6", "--num-iters", "2"]


@pytest.mark.process
def test_output_and_json_file(tiny_flags, tmp_path: Path, capsys) -> None:
    path, profiles = tmp_path / "result.json", tmp_path / "profiles"
    more = ["--num-iters-warmup", "1", "--breakdown", "--output-json", str(path), "--profile-dir", str(profiles)]
    assert main([*BATCH, *more, *tiny_flags]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 2
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert result["percentiles"]["50"] == pytest.approx(result["avg_latency"])
    phases = result["phases"]
    assert phases["prefill"]["mean"] + phases["decode"]["mean"] == pytest.approx(result["avg_latency"])
    assert phases["decode, a token"]["mean"] == pytest.approx(phases["decode"]["mean"] / 5)
    steps = result["breakdown"]
    assert steps["num_steps"] == 7, "24 prompt tokens are two steps of 16, then 5 tokens more"
    programs = {one["name"]: one for one in steps["programs"]}
    assert {"decode_4_greedy", "mixed_16_full"} <= set(programs)
    assert {"layer_0/attention", "layer_1/mlp", "head", "sample"} <= set(programs["decode_4_greedy"]["scopes_ms"])
    text = capsys.readouterr().out
    for words in ("prefill", "serialize", "attention, 2 layers", "decode_4_greedy, mean of"):
        assert words in text
    assert list(profiles.rglob("*.xplane.pb")), "a folder that was asked for keeps the profile"


@pytest.mark.grid
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "5", "--input-len", "8", "--output-len", "8"], "at most 4 sequences run at once"),
        (["--input-len", "60", "--output-len", "5"], "make 65 tokens; the context is 64"),
    ],
)
def test_a_batch_that_does_not_fit(tiny_flags, flags: list[str], message: str, capsys) -> None:
    assert main(["bench", "latency", *flags, *tiny_flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0"),
        (["--breakdown-steps", "0"], "--breakdown-steps must be at least 1"),
        (["--dataset-name", "random"], "--dataset-name is not a known flag"),
    ],
    ids=str,
)
def test_user_errors_are_one_line(flags: list[str], message: str, capsys) -> None:
    assert main(["bench", "latency", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_only_pools(capsys) -> None:
    encoder = Path(__file__).parents[2] / "fixtures" / "pooled" / "bert_mean"
    assert main(["bench", "latency", "--model", str(encoder)]) == 2
    assert "is served for vectors or labels only" in capsys.readouterr().err
