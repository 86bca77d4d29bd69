"""Compares the KV cache by groups of layers with one group for all layers, at equal memory, on this CPU.

A random model of SmolLM2-135M's size has windows of 256 tokens in five of six layers. Clients that send prompts of
2,000 tokens keep both servers busy; one of them holds 8 such requests in one KV group, the other divides the same
memory. The script compares tokens a second, and the most requests that ran at once, as medians over rounds.

    python benchmarks/kv_groups.py --rounds 3 --json benchmarks/results/cpu/kv_groups.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from serving_cpu import ServingLoad, paused, run, server

from jaxserve import model_source
from jaxserve.cli.common.table import format_table
from jaxserve.text.save import save_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "sliding_window": 256,
    "sliding_window_pattern": 6,
}
LAYERS, WINDOWED, WINDOW, PAGE = 30, 25, 256, 16
PROMPT, OUTPUT, REQUESTS_IN_ONE_GROUP = 2000, 64, 8
CONTEXT = 2560
CLIENTS = 32


def settings(groups: int) -> list[str]:
    """Return the flags of a server whose pools take the memory of `REQUESTS_IN_ONE_GROUP` requests in one group."""
    whole = -(-(PROMPT + OUTPUT) // PAGE)
    pages = REQUESTS_IN_ONE_GROUP * whole
    if groups == 1:
        return ["--disable-hybrid-swa-memory", "--max-total-tokens", str(pages * PAGE)]
    # Each request takes its pages of whole sequences and one window; a chunk of a prompt is computed besides.
    window, chunk = WINDOW // PAGE + 1, 512 // PAGE
    room = pages * LAYERS - chunk * WINDOWED
    requests = room / (whole * (LAYERS - WINDOWED) + window * WINDOWED)
    first, ratio = int(requests * whole), (requests * window + chunk) / (requests * whole)
    return ["--max-total-tokens", str(first * PAGE), "--swa-full-tokens-ratio", f"{ratio:.4f}"]


def most_running(log: str) -> int:
    """Return the largest number of requests in a server's log lines."""
    return max(int(count) for count in re.findall(r"#running-req: (\d+)", log))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=CLIENTS)
    parser.add_argument("--port", type=int, default=8060)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = ServingLoad(CLIENTS, args.requests, PROMPT, OUTPUT)
    rates: dict[int, list[float]] = {1: [], 2: []}
    running: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        model.mkdir()
        save_tokenizer(model_source.resolve("smollm2-135m-instruct"), model)
        (model / "config.json").write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "jaxserve", "serve", "--model", str(model), "--load-format", "dummy"]
        command += [
            "--context-length",
            str(CONTEXT),
            "--disable-radix-cache",
            "--program-cache-dir",
            f"{folder}/programs",
        ]
        pids = {}
        for groups in (1, 2):
            port = args.port + groups
            flags = [*command, "--port", str(port), *settings(groups)]
            pids[groups], _ = stack.enter_context(server(flags, port, f"groups-{groups}"))
        for round_ in range(args.rounds):
            for groups, pid in pids.items():
                with paused([other for other in pids.values() if other != pid]):
                    found = asyncio.run(run(args.port + groups, str(model), load, seed=round_))
                rates[groups].append(found["output_tok_s"])
                print(f"round {round_}, {groups} groups: {found}", file=sys.stderr)
        for groups in pids:
            running[groups] = most_running(
                (Path(tempfile.gettempdir()) / f"groups-{groups}-{args.port + groups}.log").read_text()
            )
            info = httpx.get(f"http://127.0.0.1:{args.port + groups}/server_info", timeout=30).json()
            assert not info.get("integrity_errors"), info
    medians = {groups: statistics.median(found) for groups, found in rates.items()}
    rows = [[f"{groups}", f"{running[groups]}", f"{medians[groups]:.1f}"] for groups in (1, 2)]
    rows.append(["ratio", f"{running[2] / running[1]:.2f}", f"{medians[2] / medians[1]:.2f}"])
    print(format_table(("KV groups", "requests at once", "output tok/s"), rows, left=(0,)))
    if args.json:
        report = {"load": load.__dict__, "rates": rates, "running": running, "flags": {g: settings(g) for g in (1, 2)}}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
