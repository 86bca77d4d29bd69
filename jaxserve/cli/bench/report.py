"""The results of `jaxserve bench serve`: as text, and as a JSON object under vLLM's key names."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.load.client_load import MAX_CPU, MAX_LATE_MS
from jaxserve.bench.load.records import RequestRecord
from jaxserve.bench.load.run_load import LoadResult
from jaxserve.bench.results.metrics import METRICS, percentile_key
from jaxserve.cli.common.table import format_table
from jaxserve.errors import ConfigError
from jaxserve.observability.acceptance import Acceptance

_NAMES = {
    "ttft": "TTFT: to the first token",
    "tpot": "TPOT: each token after it",
    "itl": "ITL: between chunks",
    "e2el": "E2EL: to the last token",
}
_MAX_ERRORS = 5


def report(about: Mapping[str, str], figures: Mapping[str, Any], run: LoadResult, percentiles: Sequence[float]) -> str:
    """Return the result as text."""
    rows = [*about.items(), ("requests", _requests(figures))]
    if figures["completed"]:
        rows += _throughput(figures)
    rows.append(("client", _client(run)))
    width = max(len(name) for name, _ in rows)
    parts = ["\n".join(f"{name:<{width}}  {text}" for name, text in rows)]
    names = ["mean", "median", "std", *map(percentile_key, percentiles)]
    measured = [metric for metric in METRICS if f"mean_{metric}_ms" in figures]
    if measured:
        lines = [[_NAMES[metric], *(f"{figures[f'{n}_{metric}_ms']:.2f}" for n in names)] for metric in measured]
        parts.append(format_table(["milliseconds", *names], lines))
    parts += [*_errors(run.records), *_warnings(figures, run)]
    return "\n\n".join(parts)


def _requests(figures: Mapping[str, Any]) -> str:
    cut = f", {figures['unfinished']} cut or not sent" if figures["unfinished"] else ""
    return f"{figures['completed']} ok, {figures['failed']} failed{cut}, in {figures['duration']:.2f} s"


def _throughput(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rates = [f"{figures['request_throughput']:.2f} requests/s"]
    if "request_goodput" in figures:
        rates.append(f"{figures['request_goodput']:.2f} of them within the goals")
    return [
        ("tokens", f"{figures['total_input_tokens']} in, {figures['total_output_tokens']} out"),
        ("rate", ", ".join(rates)),
        ("throughput", f"{figures['output_throughput']:.2f} output tokens/s, {figures['total_token_throughput']:.2f} "
         f"in all; most in a second {figures['max_output_tokens_per_s']:.0f}"),
        ("open at once", f"{figures['max_concurrent_requests']} at most"),
    ]  # fmt: skip


def describe_acceptance(seen: Acceptance) -> str:
    """Return a line on the drafts that the server verified during the run."""
    if not seen.drafts:
        return "none were verified"
    rates = ", ".join(f"{count / seen.drafts:.0%}" for count in seen.by_position)
    return (
        f"accept length {seen.length:.2f}, {seen.accepted} of {seen.draft_tokens} tokens accepted ({seen.rate:.1%}) in "
        f"{seen.drafts} drafts; by position {rates}"
    )


def _client(run: LoadResult) -> str:
    seen = run.client
    return (
        f"{seen.cpu_fraction:.1%} of a core; late by {seen.late_ms_p50:.2f} ms (median), {seen.late_ms_p99:.2f} (p99)"
    )


def _errors(records: Sequence[RequestRecord]) -> list[str]:
    """Return the reasons of failures, the most frequent first."""
    counts = Counter(record.error for record in records if record.status == "failed")
    if not counts:
        return []
    lines = [f"  {count} x {error}" for error, count in counts.most_common(_MAX_ERRORS)]
    left = len(counts) - _MAX_ERRORS
    return ["\n".join(["failed (in no average):", *lines, *([f"  and {left} other reasons"] if left > 0 else [])])]


def _warnings(figures: Mapping[str, Any], run: LoadResult) -> list[str]:
    """Return everything that makes the figures doubtful or incomplete."""
    doubts = []
    if run.interrupted:
        doubts.append("CUT: the run was ended before all requests were done; these are the figures until then.")
    if run.client.bottleneck:
        why = "it had to wait for a core, this machine is busy" if run.client.starved else "the load is too much for it"
        doubts.append(
            f"THE CLIENT IS A BOTTLENECK: {why}. Its loop was {run.client.late_ms_p99:.1f} ms late at p99 (sound: "
            f"up to {MAX_LATE_MS:g}) and took {run.client.cpu_fraction:.0%} of a core (sound: up to {MAX_CPU:.0%}). "
            "The latencies above hold its own delay."
        )
    counted = figures["counted_by"]
    if counted.get("tokenizer"):
        doubts.append(f"{counted['tokenizer']} answers came without usage: their tokens were counted by the tokenizer.")
    if counted.get("chunks"):
        doubts.append(
            f"{counted['chunks']} answers came without usage and there is no tokenizer: chunks were counted, which may "
            "hold several tokens each. Name a --tokenizer."
        )
    unknown = sum(record.prompt_tokens is None for record in run.records if record.status == "ok")
    if unknown:
        doubts.append(f"{unknown} prompts' tokens are unknown and not counted: the server sent no usage.")
    return doubts


def as_json(
    about: Mapping[str, Any], figures: Mapping[str, Any], run: LoadResult, *, detailed: bool, texts: bool
) -> dict[str, Any]:
    """Return the result under vLLM's keys and ours; `detailed` adds vLLM's lists by request and the raw records.

    Times of requests are in seconds since the start of the run.
    """
    client = {**dataclasses.asdict(run.client), "bottleneck": run.client.bottleneck}
    result = {**about, **figures, "client": client}
    if detailed:
        records = run.records
        result |= {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.output_tokens if record.status == "ok" else 0 for record in records],
            "ttfts": [record.ttft or 0.0 for record in records],
            "itls": [record.itls for record in records],
            "start_times": [_since(run, record.start) for record in records],
            "errors": [record.error for record in records],
            "records": [_record(run, record) for record in records],
        }
        if texts:
            result["generated_texts"] = [record.text for record in records]
    return result


def _record(run: LoadResult, record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "status": record.status,
        "error": record.error,
        "http_status": record.http_status,
        "finish_reason": record.finish_reason,
        "queued": record.queued,
        "start": _since(run, record.start),
        "first_token": _since(run, record.first_token),
        "token_times": [_since(run, time) for time in record.token_times],
        "end": _since(run, record.end),
        "prompt_tokens": record.prompt_tokens,
        "wanted_tokens": record.wanted_tokens,
        "output_tokens": record.output_tokens,
        "counted_by": record.counted_by,
    }


def _since(run: LoadResult, time: float | None) -> float | None:
    """Return the seconds since the start of the run; None for events that never happened."""
    return None if not time else time - run.start


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result and create missing parent folders. Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the result can't be written to {path}: {error}") from error
