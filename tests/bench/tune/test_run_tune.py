"""A search over real processes without a model, and its parts."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.bench.sweep.run_sweep import BenchCommands
from jaxserve.bench.tune.candidates import TUNED_SETTINGS, ObservedLoad, choose_candidates
from jaxserve.bench.tune.goal import read_goal
from jaxserve.bench.tune.profile import profile_text
from jaxserve.bench.tune.run_tune import Tuner, TuningResult
from jaxserve.config.load import load_config
from jaxserve.errors import ConfigError
from tests.bench import stand_in
from tests.bench.result_files import serve_result

LOAD = ["--", "--dataset-name", "random", "--num-prompts", "100", "--max-concurrency", "12"]


def tune(folder: Path, *flags: str) -> tuple[int, str]:
    file = folder / "tuned.yaml"
    code = stand_in.main(["tune", "--goal", "throughput", "--output", str(file), *flags, *LOAD])
    return code, file.read_text() if file.exists() else ""


@pytest.mark.grid
def test_the_best_settings_are_found_with_reasons(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("page_size: 32\nport: 8001\n")
    code, text = tune(tmp_path, "--config", str(base), "--minutes", "10")
    assert code == 0
    settings = yaml.safe_load(text)
    assert settings == {"page_size": 32, "max_running_requests": 16, "cuda_graph_bs": [3, 16]}
    engine = load_config(config_file=tmp_path / "tuned.yaml").engine
    assert engine.cuda_graph_bs == (3, 16)
    assert "# max_running_requests=4: x0.9" in text
    assert ": kept." in text
    assert "Result against default, both on fresh servers: x1.2" in text
    assert "schedule_conservativeness: the requests that may run need" in text


@pytest.mark.grid
def test_candidates_skipped_for_time_are_listed(tmp_path: Path) -> None:
    """The clock jumps after the first candidate: no later one is tried, and there is no final comparison."""
    times = []

    def clock() -> float:
        file = tmp_path / "server-02.run-3.json"
        times.append(0.0 if not file.exists() else 1e6)
        return times[-1]

    commands = BenchCommands(stand_in.SERVE, stand_in.LOAD)
    goal = read_goal("throughput", [])
    tuned = Tuner(
        {}, LOAD[1:], goal, minutes=10, folder=tmp_path, notify=lambda _: None, commands=commands, clock=clock
    ).tune()
    assert tuned.changes == {"max_running_requests": 16}
    assert tuned.final_comparison is None
    assert tuned.skipped["max_running_requests"] == "the time was up before max_running_requests=4"
    assert "cuda_graph_bs=[3, 16]" in tuned.skipped["cuda_graph_bs"]
    text = profile_text({}, tuned, goal, LOAD[1:], datetime.date(2026, 11, 21))
    assert "before the final comparison" in text
    assert yaml.safe_load(text) == {"max_running_requests": 16}


@pytest.mark.process
def test_without_time_there_is_no_profile(tmp_path: Path) -> None:
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
def test_user_errors(tmp_path: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(tmp_path, *flags)[0] == 2
    assert says in capsys.readouterr().err


def test_a_load_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert stand_in.main(["tune", "--goal", "throughput"]) == 2
    assert "there is no load" in capsys.readouterr().err


def seen(**changes: Any) -> ObservedLoad:
    usual: dict[str, Any] = {
        "peak_open": 64, "mean_input": 100.0, "mean_output": 50.0, "max_running": 32, "chunk": 512,
        "kv_tokens": 100_000, "preemptions": 0, "policy": "lpm", "conservativeness": 1.0,
        "steps_by_rows": {32: 100}, "padding": 0.0,
    }  # fmt: skip
    return ObservedLoad(**(usual | changes))


@pytest.mark.parametrize(
    ("setting", "observed", "values"),
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
def test_only_settings_that_can_matter_are_tried(setting: str, observed: ObservedLoad, values: tuple[Any, ...]) -> None:
    found = choose_candidates(setting, observed, "throughput")
    assert found.values == values
    assert found.why


def test_shortest_prefill_first_is_tried_for_latency() -> None:
    assert "shortest-prefill-first" in choose_candidates("schedule_policy", seen(), "latency").values
    assert set(TUNED_SETTINGS) == {
        setting for setting in TUNED_SETTINGS if choose_candidates(setting, seen(), "latency").why
    }


def test_the_latency_goal_counts_requests_within_every_limit() -> None:
    result = serve_result(0, ttft=0.1, itl=0.02, noise=0.0)
    rate = result["request_throughput"]
    assert read_goal("latency", ["ttft:101", "tpot:21"]).score(result) == pytest.approx(rate)
    half = read_goal("latency", ["ttft:101", "tpot:19"]).score(result)
    assert half == pytest.approx(0.5 / result["duration"]), "none kept it; half a request stands for none"
    assert read_goal("throughput", []).score(result) == result["output_throughput"]
    with pytest.raises(ConfigError, match="ttft, tpot, e2el"):
        read_goal("latency", ["ttft"])


def test_the_profile_warns_of_a_noisy_machine() -> None:
    for scores, noisy in (((10.0, 10.1, 9.9), False), ((10.0, 14.0, 6.0), True)):
        tuned = TuningResult({}, scores, (), {}, None, 60.0)
        text = profile_text({}, tuned, read_goal("throughput", []), LOAD[1:], datetime.date(2026, 11, 21))
        assert ("So much noise" in text) == noisy
        assert "nothing is changed" in text
