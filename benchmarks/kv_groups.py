"""Compares the KV cache by groups of layers with one group for all layers, at equal memory, on this CPU.

A random model of SmolLM2-135M's size has windows of 256 tokens in five of six layers. Clients with prompts of 2,000
tokens keep both servers busy; one of them holds 8 such requests in one KV group, the other divides the same memory.
Each client sends one prompt and waits for a long answer, or leads a conversation: after a pause it sends the prompt
before, its answer, and a few tokens more. The script compares the output tokens a second, as medians over rounds, and
the most requests that ran at once.

    python benchmarks/kv_groups.py --rounds 3 --json benchmarks/results/cpu/kv_groups.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from serving_cpu import paused, server

from jaxserve import model_source
from jaxserve.cli.common.table import format_table
from jaxserve.text.tokenizers.save import save_tokenizer

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
PROMPT, REQUESTS_IN_ONE_GROUP, CONTEXT, CLIENTS = 2000, 8, 2560, 24


@dataclasses.dataclass(frozen=True)
class GroupLoad:
    """Each client sends `turns` requests; each but the first begins with the one before and its answer.

    Before each of these, it pauses for half to one and a half times `pause` seconds.
    """

    turns: int
    output_tokens: int
    more: int = 16
    pause: float = 5.0


LOADS = {"long answers": GroupLoad(1, 256), "conversations": GroupLoad(3, 64)}


async def run(port: int, model: str, load: GroupLoad, clients: int, seed: str) -> float:
    """Run the load once, with new prompts for each seed, and return the output tokens per second."""
    rng = random.Random(seed)
    url, numbers = f"http://127.0.0.1:{port}/v1/completions", []
    options = {"model": model, "max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True}

    async def client(http: httpx.AsyncClient, tokens: list[int]) -> None:
        for turn in range(load.turns):
            if turn > 0:
                await asyncio.sleep(load.pause * rng.uniform(0.5, 1.5))
            body = {**options, "prompt": tokens, "return_token_ids": True}
            answer = (await http.post(url, json=body)).raise_for_status().json()["choices"][0]["token_ids"]
            numbers.append(len(answer))
            tokens = [*tokens, *answer, *(rng.randrange(100, 49000) for _ in range(load.more))]

    prompts = [[rng.randrange(100, 49000) for _ in range(PROMPT)] for _ in range(clients)]
    start = time.perf_counter()
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=clients)) as http:
        await asyncio.gather(*(client(http, prompt) for prompt in prompts))
    seconds = time.perf_counter() - start
    assert set(numbers) == {load.output_tokens}, "a request came back short"
    return sum(numbers) / seconds


def settings(groups: int) -> list[str]:
    """Return the flags of a server whose pools take the memory of `REQUESTS_IN_ONE_GROUP` requests in one group."""
    whole = -(-(PROMPT + max(load.output_tokens for load in LOADS.values())) // PAGE)
    pages = REQUESTS_IN_ONE_GROUP * whole
    if groups == 1:
        return ["--disable-hybrid-swa-memory", "--max-total-tokens", str(pages * PAGE)]
    # Each request takes its pages of whole sequences and one window; a chunk of a prompt is computed besides.
    window, chunk = WINDOW // PAGE + 1, 512 // PAGE
    room = pages * LAYERS - chunk * WINDOWED
    requests = room / (whole * (LAYERS - WINDOWED) + window * WINDOWED)
    first, ratio = int(requests * whole), (requests * window + chunk) / (requests * whole)
    return ["--max-total-tokens", str(first * PAGE), "--swa-full-tokens-ratio", f"{ratio:.4f}"]


def wait_until_it_answers(port: int, model: str) -> None:
    """Send small requests until one is answered: a server that was stopped for minutes takes a moment."""
    for _ in range(100):
        with contextlib.suppress(httpx.HTTPError):
            body = {"model": model, "prompt": [1], "max_tokens": 1}
            if httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the server on port {port} does not answer")


def most_running(log: str) -> int:
    """Return the largest number of requests in a server's log lines."""
    return max(int(count) for count in re.findall(r"#running-req: (\d+)", log))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--load", action="append", choices=list(LOADS), help="run only this load; may be repeated")
    parser.add_argument("--port", type=int, default=8060)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loads = {name: load for name, load in LOADS.items() if not args.load or name in args.load}
    rates: dict[str, dict[int, list[float]]] = {name: {1: [], 2: []} for name in loads}
    running: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        model.mkdir()
        save_tokenizer(model_source.resolve("smollm2-135m-instruct"), model)
        (model / "config.json").write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "jaxserve", "serve", "--model", str(model), "--load-format", "dummy"]
        command += ["--dtype", "float32", "--context-length", str(CONTEXT), "--program-cache-dir", f"{folder}/programs"]
        pids = {}
        for groups in (1, 2):
            port = args.port + groups
            flags = [*command, "--port", str(port), *settings(groups)]
            pids[groups], _ = stack.enter_context(server(flags, port, f"groups-{groups}"))
        for round_, (name, load), (groups, pid) in itertools.product(range(args.rounds), loads.items(), pids.items()):
            with paused([other for other in pids.values() if other != pid]):
                wait_until_it_answers(args.port + groups, str(model))
                rate = asyncio.run(run(args.port + groups, str(model), load, args.clients, f"{name} {round_}"))
            rates[name][groups].append(rate)
            print(f"round {round_}, {name}, {groups} groups: {rate:.1f} tokens a second", file=sys.stderr)
        for groups in pids:
            running[groups] = most_running(
                (Path(tempfile.gettempdir()) / f"groups-{groups}-{args.port + groups}.log").read_text()
            )
            info = httpx.get(f"http://127.0.0.1:{args.port + groups}/server_info", timeout=30).json()
            assert not info["stats"]["integrity_errors"], info
    rows = [["requests at once", f"{running[1]}", f"{running[2]}", f"{running[2] / running[1]:.2f}"]]
    for name, by_groups in rates.items():
        one, two = (statistics.median(found) for found in by_groups.values())
        rows.append([f"{name}: output tok/s", f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}"])
    print(format_table(("", "one group", "two groups", "ratio"), rows, left=(0,)))
    if args.json:
        given = {groups: settings(groups) for groups in (1, 2)}
        report = {"clients": args.clients, "rates": rates, "running": running, "flags": given}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
