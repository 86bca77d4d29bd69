"""Compares answers in the form of a JSON schema with free ones of the same length: tokens a second of one server.

Both kinds of load are sent to the same server in turn, in another order each round, by `jaxserve bench serve`. Ratios
are of medians over rounds. `records` is an endless list of small objects; of `boilerplate`, most tokens are the names
of properties, which the schema forces.

    python -m benchmarks.structured_outputs --rounds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from jaxserve.bench.processes.server_process import BENCH_SERVE, run_client, serving
from jaxserve.cli.common.table import format_records
from jaxserve.config.schema import DEFAULT_MODEL

OUTPUT = Path(__file__).parent / "results/cpu/structured_outputs.json"
START_SECONDS, RUN_SECONDS = 600.0, 3600.0
OUTPUT_TOKENS = 128


def _closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_RECORD = _closed(
    name={"type": "string", "maxLength": 20},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    city={"type": "string", "maxLength": 20},
    languages={"type": "array", "items": {"enum": ["English", "French", "Greek", "Hindi"]}, "maxItems": 2},
)
_REPORT = _closed(
    measured_temperature_in_degrees_celsius={"type": "integer", "minimum": -50, "maximum": 50},
    relative_humidity_of_the_air_in_percent={"type": "integer", "minimum": 0, "maximum": 100},
    general_weather_condition_at_the_station={"enum": ["sunny", "cloudy", "rainy"]},
    observations_were_confirmed_by_a_second_person={"type": "boolean"},
)
SCHEMAS = {
    name: {"type": "array", "items": item, "minItems": 30}
    for name, item in (("records", _RECORD), ("boilerplate", _REPORT))
}


@dataclasses.dataclass(frozen=True)
class StructuredLoad:
    """`requests` requests from `clients` clients, in the form of a schema of `SCHEMAS`."""

    schema: str
    clients: int
    requests: int


LOADS = {
    "records 16": StructuredLoad("records", 16, 32),
    "records 1": StructuredLoad("records", 1, 4),
    "boilerplate 16": StructuredLoad("boilerplate", 16, 32),
    "boilerplate 1": StructuredLoad("boilerplate", 1, 4),
}


def write_prompts(path: Path, load: StructuredLoad) -> None:
    """Write JSON lines that `bench serve --dataset-name custom` reads."""
    subjects = {"records": "people who live in town", "boilerplate": "weather reports of station"}
    lines = (
        {"prompt": f"Write a long JSON list of {subjects[load.schema]} number {i}.", "output_tokens": OUTPUT_TOKENS}
        for i in range(load.requests)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def send(url: str, load: StructuredLoad, *, constrained: bool, folder: Path) -> dict[str, float]:
    """Run `bench serve` once, without cached prompts, and return its figures."""
    httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    prompts, result = folder / "prompts.jsonl", folder / "result.json"
    write_prompts(prompts, load)
    command = [*BENCH_SERVE, "--base-url", url, "--backend", "openai-chat", "--dataset-name", "custom", "--ignore-eos"]
    command += ["--dataset-path", str(prompts), "--disable-shuffle", "--temperature", "0", "--disable-tqdm"]
    command += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.clients)]
    if constrained:
        command += ["--extra-body", json.dumps({"structured_outputs": {"json": SCHEMAS[load.schema]}})]
    run_client([*command, "--output-json", str(result)], folder / "client.log", timeout=RUN_SECONDS)
    measured: dict[str, Any] = json.loads(result.read_text())
    failed = [record["error"] for record in measured["records"] if record["status"] != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0]}")
    if measured["total_output_tokens"] != load.requests * OUTPUT_TOKENS:
        raise SystemExit(f"the answers have {measured['total_output_tokens']} tokens")
    return {"tok_s": measured["output_throughput"], "ttft_ms": measured["median_ttft_ms"]}


def measure(url: str, name: str, load: StructuredLoad, rounds: int, folder: Path) -> dict[str, Any]:
    """Send both kinds in turn; return the figures of each round, and their medians."""
    samples: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for kind in samples:
        warm_up = dataclasses.replace(load, requests=max(load.clients, 2))
        send(url, warm_up, constrained=kind == "with", folder=folder)
    for round_ in range(rounds):
        for kind in list(samples)[:: -1 if round_ % 2 else 1]:
            figures = send(url, load, constrained=kind == "with", folder=folder)
            samples[kind].append(figures)
            print(f"round {round_} {kind}, {name}: {figures}", file=sys.stderr)
    medians = {
        kind: {key: statistics.median(figures[key] for figures in runs) for key in runs[0]}
        for kind, runs in samples.items()
    }
    ratio = medians["with"]["tok_s"] / medians["without"]["tok_s"]
    return {"load": dataclasses.asdict(load), "samples": samples, "medians": medians, "ratio": ratio}


def print_report(results: dict[str, dict[str, Any]]) -> None:
    """Print a row for each load."""
    rows = [
        {
            "load": name,
            "tok/s without": result["medians"]["without"]["tok_s"],
            "with": result["medians"]["with"]["tok_s"],
            "ratio": result["ratio"],
            "TTFT without": result["medians"]["without"]["ttft_ms"],
            "TTFT with": result["medians"]["with"]["ttft_ms"],
        }
        for name, result in results.items()
    ]
    print(format_records(rows, decimals=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="append", choices=list(LOADS), help="run only this load; may be repeated")
    parser.add_argument("--args", default="", help="flags of the server")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "flags": args.args,
        "rounds": args.rounds,
        "output_tokens": OUTPUT_TOKENS,
        "machine_load_at_start": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as temporary:
        command = ["--model", DEFAULT_MODEL, *shlex.split(args.args)]
        log = Path(tempfile.gettempdir()) / "structured-outputs.log"
        with serving(command, log, timeout=START_SECONDS) as server:
            results = report["results"] = {}
            args.output.parent.mkdir(parents=True, exist_ok=True)
            for name, load in LOADS.items():
                if not args.load or name in args.load:
                    results[name] = measure(server.url, name, load, args.rounds, Path(temporary))
                    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print_report(results)


if __name__ == "__main__":
    main()
