"""One run as a JSON file has it, ours or vLLM's: what was measured, under which load, and the raw requests behind it.

It reads `bench serve`, `bench throughput` and `bench latency`, told apart by their keys. It compares nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxserve.errors import ConfigError

Kind = Literal["serve", "throughput", "latency"]

_MARKS: dict[Kind, tuple[str, ...]] = {
    "serve": ("request_throughput", "completed", "duration"),
    "throughput": ("elapsed_time", "num_requests", "tokens_per_second"),
    "latency": ("avg_latency", "latencies"),
}
_HIGHER: dict[Kind, tuple[str, ...]] = {
    "serve": ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    "throughput": ("requests_per_second", "tokens_per_second", "output_tokens_per_second"),
    "latency": (),
}
TIMES = ("ttft", "tpot", "itl", "e2el")
# Written only where they are used.
_RAMP_UP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
# What makes two loads different: these where both files say them.
_WORKLOAD: dict[Kind, tuple[str, ...]] = {
    "serve": ("dataset", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    "throughput": ("dataset", "num_requests"),
    "latency": ("batch_size", "input_len", "output_len"),
}


@dataclasses.dataclass(frozen=True)
class Requests:
    """The completed requests of a run in the order they were sent: seconds and tokens, one value a request.

    `tpot` is NaN where a request had one token. `itl` holds all gaps, `num_gaps` how many each request has of them.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    e2el: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    itl: np.ndarray
    num_gaps: np.ndarray

    def __len__(self) -> int:
        return len(self.ttft)


@dataclasses.dataclass(frozen=True)
class RunFile:
    """One run. `figures` are the file's own numbers by name, `higher` those of which more is better; `workload` is what
    must be equal for two runs to be compared, `tokens` the mean tokens a request had in and out."""

    path: str
    kind: Kind
    model: str | None
    figures: Mapping[str, float]
    higher: frozenset[str]
    workload: Mapping[str, Any]
    tokens: Mapping[str, float]
    completed: int
    failed: int
    duration: float = 0.0
    interrupted: bool = False
    requests: Requests | None = None
    latencies: np.ndarray | None = None

    @property
    def in_flight(self) -> float:
        """How many requests were open at once, on average."""
        return 0.0 if self.requests is None else float(self.requests.e2el.sum()) / self.duration


def read_runs(path: Path) -> list[RunFile]:
    """The runs a file holds: one, or with one JSON object a line as many. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    try:
        found = [json.loads(text)]
    except json.JSONDecodeError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            found = [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            found = []
        if not found:
            raise ConfigError(f"{path} is not JSON: {error}") from None
    return [as_run(str(path), one) for one in found]


def as_run(path: str, content: object) -> RunFile:
    """The run in a parsed file. Raises `ConfigError` when it is none that can be compared."""
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object of a benchmark")
    kind = next((kind for kind, marks in _MARKS.items() if all(mark in content for mark in marks)), None)
    if kind is None:
        raise ConfigError(
            f"{path} is no result that can be compared: it has neither the keys of `bench serve` "
            f"({', '.join(_MARKS['serve'])}) nor those of `bench throughput` or `bench latency`"
        )
    try:
        return _READERS[kind](path, content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is a broken result of `bench {kind}`: {type(error).__name__} {error}") from None


def _serve(path: str, content: Mapping[str, Any]) -> RunFile:
    names = [name for name in content if name.endswith("_ms") and name.split("_")[1] in TIMES]
    names = [name for name in names if not name.startswith("std_")]
    completed = int(content["completed"])
    return RunFile(
        path=path,
        kind="serve",
        model=content.get("model_id"),
        figures=_figures(content, "serve", names),
        higher=frozenset(_HIGHER["serve"]),
        workload=_workload(content, "serve"),
        tokens={
            f"mean {side} tokens of a request": content[f"total_{side}_tokens"] / completed
            for side in ("input", "output")
            if completed
        },
        completed=completed,
        failed=_failed(content),
        duration=float(content["duration"]),
        interrupted=bool(content.get("interrupted")),
        requests=_requests(content),
    )


def _throughput(path: str, content: Mapping[str, Any]) -> RunFile:
    count = int(content["num_requests"])
    totals = {side: content.get(f"total_{side}_tokens") for side in ("num", "input", "output")}
    return RunFile(
        path=path,
        kind="throughput",
        model=content.get("model_id") or content.get("model"),
        figures=_figures(content, "throughput", []),
        higher=frozenset(_HIGHER["throughput"]),
        workload=_workload(content, "throughput"),
        tokens={
            f"{'all' if side == 'num' else side} tokens of a request": total / count
            for side, total in totals.items()
            if total is not None and count
        },
        completed=count,
        failed=0,
    )


def _latency(path: str, content: Mapping[str, Any]) -> RunFile:
    latencies = np.asarray(content["latencies"], float)
    return RunFile(
        path=path,
        kind="latency",
        model=content.get("model_id") or content.get("model"),
        figures={"avg_latency": float(content["avg_latency"])}
        | {f"p{point}_latency": float(value) for point, value in content.get("percentiles", {}).items()},
        higher=frozenset(),
        workload=_workload(content, "latency"),
        tokens={},
        completed=len(latencies),
        failed=0,
        latencies=latencies,
    )


_READERS = {"serve": _serve, "throughput": _throughput, "latency": _latency}


def _figures(content: Mapping[str, Any], kind: Kind, times: Iterable[str]) -> dict[str, float]:
    """The numbers above 0: a rate or a time of 0 says that nothing was measured."""
    values = {name: content.get(name) for name in (*_HIGHER[kind], *times)}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and value > 0
    }


def _workload(content: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    found = {name: content[name] for name in _WORKLOAD[kind] if name in content}
    if kind == "serve":
        found |= {name: content.get(name) for name in _RAMP_UP}
    if found.get("request_rate") in (math.inf, "inf", "Infinity"):
        found["request_rate"] = "inf"
        found.pop("burstiness", None)  # nothing is spaced, so it means nothing
    return found


def _failed(content: Mapping[str, Any]) -> int:
    if isinstance(content.get("failed"), int):
        return int(content["failed"])
    return sum(1 for error in content.get("errors") or () if error)


def _requests(content: Mapping[str, Any]) -> Requests | None:
    """The completed requests, where the file has them (vLLM: `--save-detailed`)."""
    if not all(isinstance(content.get(name), list) for name in ("ttfts", "itls", "output_lens")):
        return None
    count = len(content["ttfts"])
    errors = content.get("errors") or [None] * count
    starts = content.get("start_times") or range(count)
    inputs = content.get("input_lens") or [0] * count
    kept = [i for i in range(count) if not errors[i] and content["output_lens"][i] > 0]
    kept.sort(key=lambda i: starts[i])
    if not kept:
        return None
    ttft = np.array([content["ttfts"][i] for i in kept], float)
    gaps = [np.asarray(content["itls"][i], float) for i in kept]
    tokens = np.array([content["output_lens"][i] for i in kept], float)
    decoding = np.array([gap.sum() for gap in gaps])
    return Requests(
        ttft=ttft,
        tpot=np.where(tokens > 1, decoding / np.maximum(tokens - 1, 1), np.nan),
        e2el=ttft + decoding,
        input_tokens=np.array([inputs[i] for i in kept], float),
        output_tokens=tokens,
        itl=np.concatenate(gaps),
        num_gaps=np.array([len(gap) for gap in gaps]),
    )
