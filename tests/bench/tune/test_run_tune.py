"""A search over processes that are real but for the model, and its parts alone."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.bench.sweep.run_sweep import Commands
from jaxserve.bench.tune.candidates import KNOBS, Observed, candidates
from jaxserve.bench.tune.goal import read_goal
from jaxserve.bench.tune.profile import profile
from jaxserve.bench.tune.run_tune import Tuned, Tuner
from jaxserve.config.load import load
from jaxserve.errors import ConfigError
from tests.bench import stand_in
from tests.bench.result_files import serve_result

LOAD = ["--", "--dataset-name", "random", "--num-prompts", "100", "--max-concurrency", "12"]


def tune(folder: Path, *flags: str) -> tuple[int, str]:
    file = folder / "tuned.yaml"
    code = stand_in.main(["tune", "--goal", "throughput", "--output", str(file), *flags, *LOAD])
    return code, file.read_text() if file.exists() else ""


def test_the_best_settings_are_found_and_said_why(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("page_size: 32\nport: 8001\n")
    code, text = tune(tmp_path, "--config", str(base), "--minutes", "10")
    assert code == 0
    settings = yaml.safe_load(text)
    assert settings == {"page_size": 32, "max_running_requests": 16, "cuda_graph_bs": [3, 16]}
    engine, _ = load(config_file=tmp_path / "tuned.yaml")
    assert engine.cuda_graph_bs == (3, 16)
    assert "# max_running_requests=4: x0.9" in text
    assert ": kept." in text
    assert "Result against default, both on fresh servers: x1.2" in text
    assert "schedule_conservativeness: all that may run needs about" in text


def test_what_the_time_did_not_allow_is_said(tmp_path: Path) -> None:
    """A clock that jumps when the first candidate has been measured: nothing after it is tried, nor claimed."""
    times = []

    def clock() -> float:
        file = tmp_path / "server-02.run-3.json"
        times.append(0.0 if not file.exists() else 1e6)
        return times[-1]

    commands = Commands(stand_in.SERVE, stand_in.LOAD)
    goal = read_goal("throughput", [])
    tuned = Tuner(
        {}, LOAD[1:], goal, minutes=10, folder=tmp_path, say=lambda _: None, commands=commands, clock=clock
    ).tune()
    assert tuned.changes == {"max_running_requests": 16}
    assert tuned.check is None
    assert tuned.skipped["max_running_requests"] == "the time was up before max_running_requests=4"
    assert "cuda_graph_bs=[3, 16]" in tuned.skipped["cuda_graph_bs"]
    text = profile({}, tuned, goal, LOAD[1:], datetime.date(2026, 11, 21))
    assert "before default and result could meet once more" in text
    assert yaml.safe_load(text) == {"max_running_requests": 16}


def test_without_time_nothing_is_claimed(tmp_path: Path) -> None:
    assert tune(tmp_path, "--minutes", "0.02") == (2, "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--limit", "ttft:200"], "--limit belongs to --goal latency"),
        (["--goal", "latency"], "needs limits"),
        (["--goal", "latency", "--limit", "foo:1"], "--limit foo:1 must be METRIC:MILLISECONDS"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--max-runing-requests", "3"], "did you mean --max-running-requests"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path, *flags)[0] == 2
    assert says in capsys.readouterr().err


def test_a_load_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert stand_in.main(["tune", "--goal", "throughput"]) == 2
    assert "there is no load" in capsys.readouterr().err


def seen(**changes: Any) -> Observed:
    usual: dict[str, Any] = {
        "peak_open": 64, "mean_input": 100.0, "mean_output": 50.0, "max_running": 32, "chunk": 512,
        "kv_tokens": 100_000, "preemptions": 0, "policy": "lpm", "conservativeness": 1.0,
        "steps_by_rows": {32: 100}, "padding": 0.0,
    }  # fmt: skip
    return Observed(**(usual | changes))


@pytest.mark.parametrize(
    ("knob", "observed", "values"),
    [
        ("max_running_requests", seen(), (64, 16)),
        ("max_running_requests", seen(peak_open=20), (16,)),
        ("max_running_requests", seen(peak_open=8), ()),
        ("chunked_prefill_size", seen(), (1024, 256)),
        ("chunked_prefill_size", seen(peak_open=4), (256,)),
        ("chunked_prefill_size", seen(peak_open=1), ()),
        ("schedule_policy", seen(), ("fcfs",)),
        ("schedule_policy", seen(peak_open=8), ()),
        ("schedule_conservativeness", seen(), ()),
        ("schedule_conservativeness", seen(kv_tokens=2000), (0.3,)),
        ("schedule_conservativeness", seen(kv_tokens=2000, preemptions=3), (1.3,)),
        ("cuda_graph_bs", seen(), ()),
        ("cuda_graph_bs", seen(steps_by_rows={20: 50, 32: 50}, padding=0.2), ([20, 32],)),
    ],
)
def test_only_what_can_matter_is_tried(knob: str, observed: Observed, values: tuple[Any, ...]) -> None:
    found = candidates(knob, observed, "throughput")
    assert found.values == values
    assert found.why


def test_the_order_of_short_prompts_counts_for_latency() -> None:
    assert "shortest-prefill-first" in candidates("schedule_policy", seen(), "latency").values
    assert set(KNOBS) == {knob for knob in KNOBS if candidates(knob, seen(), "latency").why}


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    result = serve_result(0, ttft=0.1, itl=0.02, noise=0.0)
    rate = result["request_throughput"]
    assert read_goal("latency", ["ttft:101", "tpot:21"]).score(result) == pytest.approx(rate)
    half = read_goal("latency", ["ttft:101", "tpot:19"]).score(result)
    assert half == pytest.approx(0.5 / result["duration"]), "none kept it; half a request stands for none"
    assert read_goal("throughput", []).score(result) == result["output_throughput"]
    with pytest.raises(ConfigError, match="ttft, tpot, e2el"):
        read_goal("latency", ["ttft"])


def test_a_noisy_machine_is_named() -> None:
    for scores, noisy in (((10.0, 10.1, 9.9), False), ((10.0, 14.0, 6.0), True)):
        tuned = Tuned({}, scores, (), {}, None, 60.0)
        text = profile({}, tuned, read_goal("throughput", []), LOAD[1:], datetime.date(2026, 11, 21))
        assert ("So much noise" in text) == noisy
        assert "nothing is changed" in text
