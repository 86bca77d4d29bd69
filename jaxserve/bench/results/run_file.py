"""Reads a run from a result file of jaxserve or vLLM: its figures, its load, and its raw requests.

It reads results of `bench serve`, `bench throughput` and `bench latency` and tells them apart by their keys.
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

_REQUIRED_KEYS: dict[Kind, tuple[str, ...]] = {
    "serve": ("request_throughput", "completed", "duration"),
    "throughput": ("elapsed_time", "num_requests", "tokens_per_second"),
    "latency": ("avg_latency", "latencies"),
}
_HIGHER_IS_BETTER: dict[Kind, tuple[str, ...]] = {
    "serve": ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    "throughput": ("requests_per_second", "tokens_per_second", "output_tokens_per_second"),
    "latency": (),
}
LATENCY_METRICS = ("ttft", "tpot", "itl", "e2el")
# Only results of a ramp-up have these keys.
_RAMP_UP_KEYS = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
# Two loads differ if one of these keys is in both files with different values.
_WORKLOAD_KEYS: dict[Kind, tuple[str, ...]] = {
    "serve": ("dataset", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    "throughput": ("dataset", "num_requests"),
    "latency": ("batch_size", "input_len", "output_len"),
}


@dataclasses.dataclass(frozen=True)
class RawRequests:
    """The completed requests of a run in the order they were sent: seconds and token counts, one value per request.

    `tpot` is NaN for a request of one token. `itl` holds the gaps of all requests, `num_gaps` their number per request.
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
    """The results of one run, read from its file.

    - `figures`: the file's numbers by name; `higher_is_better` lists the figures where more is better.
    - `workload`: must be equal for two runs to be compared.
    - `tokens`: mean prompt and output tokens per request.
    """

    path: str
    kind: Kind
    model: str | None
    figures: Mapping[str, float]
    higher_is_better: frozenset[str]
    workload: Mapping[str, Any]
    tokens: Mapping[str, float]
    completed: int
    failed: int
    duration: float = 0.0
    interrupted: bool = False
    requests: RawRequests | None = None
    latencies: np.ndarray | None = None

    @property
    def in_flight(self) -> float:
        """The mean number of open requests."""
        return 0.0 if self.requests is None else float(self.requests.e2el.sum()) / self.duration


def read_runs(path: Path) -> list[RunFile]:
    """Read the runs of a file: one JSON object, or one object per line. Raises `ConfigError`."""
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
    """Return the run in a parsed file. Raises `ConfigError` if it isn't a result that can be compared."""
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object of a benchmark")
    kind = next((kind for kind, marks in _REQUIRED_KEYS.items() if all(mark in content for mark in marks)), None)
    if kind is None:
        raise ConfigError(
            f"{path} is not a result that can be compared: it has neither the keys of `bench serve` "
            f"({', '.join(_REQUIRED_KEYS['serve'])}) nor those of `bench throughput` or `bench latency`"
        )
    try:
        return _READERS[kind](path, content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is a broken result of `bench {kind}`: {type(error).__name__} {error}") from None


def _serve(path: str, content: Mapping[str, Any]) -> RunFile:
    names = [name for name in content if name.endswith("_ms") and name.split("_")[1] in LATENCY_METRICS]
    names = [name for name in names if not name.startswith("std_")]
    completed = int(content["completed"])
    return RunFile(
        path=path,
        kind="serve",
        model=content.get("model_id"),
        figures=_figures(content, "serve", names),
        higher_is_better=frozenset(_HIGHER_IS_BETTER["serve"]),
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
        higher_is_better=frozenset(_HIGHER_IS_BETTER["throughput"]),
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
        higher_is_better=frozenset(),
        workload=_workload(content, "latency"),
        tokens={},
        completed=len(latencies),
        failed=0,
        latencies=latencies,
    )


_READERS = {"serve": _serve, "throughput": _throughput, "latency": _latency}


def _figures(content: Mapping[str, Any], kind: Kind, times: Iterable[str]) -> dict[str, float]:
    """Return the numbers above 0: a rate or a time of 0 means that nothing was measured."""
    values = {name: content.get(name) for name in (*_HIGHER_IS_BETTER[kind], *times)}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and value > 0
    }


def _workload(content: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    found = {name: content[name] for name in _WORKLOAD_KEYS[kind] if name in content}
    if kind == "serve":
        found |= {name: content.get(name) for name in _RAMP_UP_KEYS}
    if found.get("request_rate") in (math.inf, "inf", "Infinity"):
        found["request_rate"] = "inf"
        found.pop("burstiness", None)  # without gaps between requests it has no effect
    return found


def _failed(content: Mapping[str, Any]) -> int:
    if isinstance(content.get("failed"), int):
        return int(content["failed"])
    return sum(1 for error in content.get("errors") or () if error)


def _requests(content: Mapping[str, Any]) -> RawRequests | None:
    """Return the completed requests if the file has them (vLLM: `--save-detailed`), else None."""
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
    return RawRequests(
        ttft=ttft,
        tpot=np.where(tokens > 1, decoding / np.maximum(tokens - 1, 1), np.nan),
        e2el=ttft + decoding,
        input_tokens=np.array([inputs[i] for i in kept], float),
        output_tokens=tokens,
        itl=np.concatenate(gaps),
        num_gaps=np.array([len(gap) for gap in gaps]),
    )
