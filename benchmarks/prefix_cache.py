"""Measures how the prefix cache shortens the time to the first token: SmolLM2-135M, 500 shared and 100 unique tokens.

Two servers, one of them with `--disable-radix-cache`, are loaded in turn while the other one is stopped; the script
compares medians over rounds. Every round has a new system prompt, which its first request brings into the cache.

    python -m benchmarks.prefix_cache --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving_cpu import REPOSITORY, ServingLoad, measure, server
from jaxserve.cli.common.table import format_table

MODEL = "smollm2-135m-instruct"
LOADS = {
    f"{clients}": ServingLoad(clients, requests=max(8, 2 * clients), prompt_tokens=600, output_tokens=4, shared=500)
    for clients in (1, 4, 16)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8060)
    parser.add_argument("--output", default=str(REPOSITORY / "benchmarks/results/cpu/prefix_cache.json"))
    args = parser.parse_args()
    report: dict[str, Any] = {
        "loads": {name: dataclasses.asdict(load) for name, load in LOADS.items()},
        "rounds": args.rounds,
        "machine_load_at_start": os.getloadavg()[0],
    }
    servers = {}
    with contextlib.ExitStack() as stack:
        for port, (name, flags) in enumerate({"with": [], "without": ["--disable-radix-cache"]}.items(), args.port):
            command = [sys.executable, "-m", "jaxserve", "serve", "--model", MODEL, "--port", str(port), *flags]
            pid, _ = stack.enter_context(server(command, port, f"prefix-cache-{name}"))
            servers[name] = (pid, port, MODEL)
        report["results"] = measure(servers, LOADS, args.rounds)
    rows = []
    for load in LOADS:
        ours, bare = (report["results"][name][load]["ttft_ms"] for name in ("with", "without"))
        rows.append([load, f"{ours:.1f}", f"{bare:.1f}", f"{1 - ours / bare:.1%}"])
    print(format_table(("clients", "TTFT ms with", "without", "less"), rows))
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
