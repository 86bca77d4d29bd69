"""Measures the accuracy and the cost of the client of `jaxserve bench serve`, against a server with known times.

Two loads: a few streams show the errors of TTFT and TPOT against the server's own record; 500 streams of 20 tokens/s
show the client's share of a core, the lateness of its loop, and how long tokens waited in its socket.

    python -m benchmarks.bench_client
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.known_server import ROOT, in_a_process

ITL = 0.05
TTFT = 0.2


def bench(port: int, streams: int, tokens: int) -> dict[str, Any]:
    """Run `jaxserve bench serve` and return its JSON. Streams start at an even rate over two seconds, because the
    requests of a real server don't all arrive in the same instant."""
    behaviour = {"known": {"ttft": TTFT, "itl": ITL}}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "jaxserve", "bench", "serve", "--port", str(port), "--dataset-name", "random-ids",
            "--vocab-size", "1000", "--random-input-len", "128", "--random-output-len", str(tokens),
            "--num-prompts", str(streams), "--request-rate", str(streams / 2), "--burstiness", "inf",
            "--extra-body", json.dumps(behaviour), "--output-json", str(result), "--disable-tqdm",
            "--request-id-prefix", f"{streams}-",
        ]  # fmt: skip
        print(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout, file=sys.stderr)
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def compare(port: int, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the errors against the server's record, in milliseconds and as shares."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/sent") as answer:
        sent = json.load(answer)
    ttft, tpot, waits = [], [], []
    for record in measured["records"]:
        assert record["status"] == "ok", record["error"]
        there = sent[record["id"]]
        tokens = there["tokens"]
        ttft.append((record["first_token"] - record["start"], tokens[0] - there["arrived"]))
        seen = record["token_times"]
        tpot.append(((seen[-1] - seen[0]) / (len(seen) - 1), (tokens[-1] - tokens[0]) / (len(tokens) - 1)))
        # Relative to the first token's delay: both processes share a clock, but the start of the run is unknown.
        waits += [(b - seen[0]) - (a - tokens[0]) for a, b in zip(tokens, seen)]
    return {
        "ttft": error(ttft),
        "tpot": error(tpot),
        "token_delay_against_first_ms": dict(zip(("p50", "p99", "max"), 1e3 * np.percentile(waits, (50, 99, 100)))),
    }


def error(pairs: list[tuple[float, float]]) -> dict[str, float]:
    seen, sent = np.array(pairs).T
    return {
        "server_median_ms": 1e3 * float(np.median(sent)),
        "median_error_ms": 1e3 * float(np.median(seen - sent)),
        "median_error_share": float(np.median(seen - sent) / np.median(sent)),
        "max_error_ms": 1e3 * float(np.max(np.abs(seen - sent))),
    }


def run(streams: int, tokens: int) -> dict[str, Any]:
    """Run one load on a new server."""
    with in_a_process() as port:
        measured = bench(port, streams, tokens)
        return {
            "streams": streams,
            "tokens": tokens,
            "output_tokens_per_s_at_most": measured["max_output_tokens_per_s"],
            "open_at_most": measured["max_concurrent_requests"],
            "client": measured["client"],
            **compare(port, measured),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of each of the many streams")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/cpu/bench_client.json")
    args = parser.parse_args()
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {platform.python_version()}",
        "load_average_before": os.getloadavg()[0],
        "server": {"ttft_ms": 1e3 * TTFT, "itl_ms": 1e3 * ITL},
        "few": run(8, 64),
        "many": run(args.streams, math.ceil(args.seconds / ITL)),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
