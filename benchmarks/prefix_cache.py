"""What the prefix cache does for the time to the first token: SmolLM2-135M, prompts of 500 shared and 100 own tokens.

Two servers, one of them with `--disable-radix-cache`, are loaded in turn, the other one stopped meanwhile; medians of
the rounds are compared. Every round has a system prompt of its own, which its first request brings into the cache.

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

from benchmarks.serving_cpu import REPOSITORY, Load, measure, server

MODEL = "smollm2-135m-instruct"
LOADS = {
    f"{clients}": Load(clients=clients, requests=max(8, 2 * clients), prompt_tokens=600, output_tokens=4, shared=500)
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
    print(f"{'clients':>8} {'TTFT ms with':>13} {'without':>9} {'less':>6}")
    for load in LOADS:
        ours, bare = (report["results"][name][load]["ttft_ms"] for name in ("with", "without"))
        print(f"{load:>8} {ours:13.1f} {bare:9.1f} {1 - ours / bare:6.1%}")
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
