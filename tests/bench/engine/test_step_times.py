from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.engine.step_times import read_step_times, step_times
from jaxserve.cli.bench.breakdown import breakdown
from jaxserve.errors import BenchRunError

SCOPES = {
    "jit_decode_2": {"dot.1": "layer_0/attention/paged_attention", "dot.2": "layer_1/mlp", "add": "sample/logprobs"}
}


def span(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": ts, "dur": dur}


def operation(
    name: str, ts: float, dur: float, *, pid: int = 1, tid: int = 7, run: str | None = "a", module: str = "jit_decode_2"
) -> dict[str, Any]:
    arguments = {"hlo_op": name, "hlo_module": module} | ({} if run is None else {"run_id": run})
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": arguments}


def named(kind: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


# Two steps of 5 ms.
HOST = [
    span("plan", 1000, 100), span("build", 1100, 200), span("dispatch", 1300, 500), span("dispatch", 1800, 500),
    span("wait", 3000, 2000), span("commit", 5000, 100), span("commit", 5200, 100), span("serialize", 5300, 200),
    span("plan", 6000, 300), span("wait", 7000, 3800), span("commit", 10800, 200),
]  # fmt: skip


def test_host_phases_are_means_of_a_step() -> None:
    times = step_times([*HOST, {"ph": "X", "pid": 1, "tid": 1, "name": "something else", "ts": 0, "dur": 9}], {})
    assert times.num_steps == 2
    assert times.wall_ms == pytest.approx(5.0)
    assert times.host_ms == pytest.approx(
        {"plan": 0.2, "build": 0.1, "dispatch": 0.5, "wait": 2.9, "commit": 0.2, "serialize": 0.1}
    )
    assert times.other_ms == pytest.approx(1.0)
    assert times.programs == []
    assert "has no times of operations" in breakdown(times)


def test_nested_operations_are_not_counted_twice() -> None:
    events = [
        *HOST,
        operation("while", 0, 1000), operation("dot.1", 100, 300), operation("add", 450, 50),
        operation("add", 2000, 40), operation("dot.2", 500, 1000, tid=8), operation("dot.2", 9000, 600, run="b"),
    ]  # fmt: skip
    [program] = step_times(events, SCOPES).programs
    assert (program.name, program.runs) == ("decode_2", 2)
    assert program.scopes_ms == pytest.approx(
        {"unnamed": 0.325, "layer_0/attention": 0.15, "sample": 0.045, "layer_1/mlp": 0.8}
    )
    # Threads overlap: from 0 to 1500, 2000 to 2040, 9000 to 9600 microseconds.
    assert program.busy_ms == pytest.approx((1.5 + 0.04 + 0.6) / 2)


def test_device_lines_replace_host_threads() -> None:
    device = [
        named("process_name", "/device:TPU:0", 3),
        named("thread_name", "XLA Ops", 3, 1),
        named("thread_name", "Steps", 3, 2),
    ]
    events = [
        *HOST, *device, operation("dot.1", 0, 10_000),
        operation("dot.1", 0, 4000, pid=3, tid=1, run=None), operation("dot.1", 0, 9000, pid=3, tid=2, run=None),
    ]  # fmt: skip
    [program] = step_times(events, SCOPES).programs
    assert program.runs is None
    assert program.scopes_ms == pytest.approx({"layer_0/attention": 4.0})
    streams = [event for event in events if event["name"] != "thread_name"]
    [program] = step_times(streams, SCOPES).programs
    assert program.busy_ms == pytest.approx(9.0)


def test_the_breakdown_sums_layers() -> None:
    events = [*HOST, operation("dot.1", 0, 300), operation("dot.3", 400, 100)]
    scopes = {"jit_decode_2": {"dot.1": "layer_0/attention", "dot.3": "layer_1/attention"}}
    text = breakdown(step_times(events, scopes))
    assert "attention, 2 layers" in text
    [row] = [line.split() for line in text.splitlines() if line.startswith("wait")]
    assert row == ["wait", "2.900", "58.0%"]
    [row] = [line.split() for line in text.splitlines() if line.startswith("attention")]
    assert row[-2:] == ["0.400", "100.0%"]


def _write(folder: Path, events: list[Any]) -> Path:
    (folder / "vm.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (folder / "scopes.json.gz").write_bytes(gzip.compress(json.dumps(SCOPES).encode()))
    return folder


def test_a_profile_folder_is_read(tmp_path: Path) -> None:
    assert read_step_times(_write(tmp_path, [*HOST, {}])).num_steps == 2
    (tmp_path / "scopes.json.gz").write_bytes(b"half")
    with pytest.raises(BenchRunError, match="holds no profile"):
        read_step_times(tmp_path)


def test_a_profile_without_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchRunError, match="no profile of an engine"):
        read_step_times(tmp_path)
    with pytest.raises(BenchRunError, match="no step of an engine"):
        read_step_times(_write(tmp_path, []))


def test_a_truncated_trace_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.bench.engine.step_times._MAX_EVENTS", len(HOST))
    with pytest.raises(BenchRunError, match="profile fewer steps"):
        read_step_times(_write(tmp_path, HOST))
