"""jaxserve beside vLLM on this CPU: SmolLM2-135M, 128 tokens in, 64 out, one client and sixteen, in one run.

Both servers stay up and are loaded in turn, the other one stopped meanwhile, so that what else the machine does falls
on both alike; medians of the rounds are compared. Without `--peer DIR` (a folder made by
shared/tools/peer_vllm_cpu.sh) only jaxserve is measured.

    python benchmarks/serving_cpu.py --peer /tmp/peer --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
CLIENTS = (1, 16)
REPOSITORY = Path(__file__).parents[1]


@contextlib.contextmanager
def server(command: list[str], port: int, name: str) -> Iterator[tuple[int, float]]:
    """A server process and the seconds until its /health said 200."""
    log = Path(tempfile.gettempdir()) / f"{name}-{port}.log"
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}; see {log}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.05)
        yield process.pid, time.monotonic() - start
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


async def one_request(port: int, model: str, prompt: list[int]) -> dict[str, float]:
    """Seconds to the first token and to the last, and how many came.

    Reads the socket itself: a comfortable client's own work, on the two cores the servers compute on, would be measured
    with theirs.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    first = last = tokens = 0.0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        if b'"choices":[]' in line:
            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        else:
            last = time.perf_counter() - start
            first = first or last
    writer.close()
    return {"ttft": first, "end": last, "tokens": tokens}


async def load(port: int, model: str, clients: int, requests: int, seed: int) -> dict[str, float]:
    """`clients` at a time until `requests` are done."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 49000) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    results: list[dict[str, float]] = []

    async def worker() -> None:
        while prompts:
            results.append(await one_request(port, model, prompts.pop()))

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(clients)))
    seconds = time.perf_counter() - start
    assert all(result["tokens"] == OUTPUT_TOKENS for result in results), "a request came back short"
    return {
        "output_tok_s": sum(result["tokens"] for result in results) / seconds,
        "ttft_ms": 1e3 * statistics.median(result["ttft"] for result in results),
        "tpot_ms": 1e3 * statistics.median((r["end"] - r["ttft"]) / (r["tokens"] - 1) for r in results),
    }


def measure(servers: dict[str, tuple[int, int, str]], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over rounds by server and number of clients; the servers take turns within a round."""
    samples: dict[str, dict[int, list[dict[str, float]]]] = {name: {c: [] for c in CLIENTS} for name in servers}
    for name, (pid, port, model) in servers.items():
        for clients in CLIENTS:
            with paused([other for other, _, _ in servers.values() if other != pid]):
                asyncio.run(load(port, model, clients, clients, seed=0))
            print(f"warmed up {name} with {clients}", file=sys.stderr)
    for round_ in range(rounds):
        for clients in CLIENTS:
            for name, (pid, port, model) in servers.items():
                with paused([other for other, _, _ in servers.values() if other != pid]):
                    result = asyncio.run(load(port, model, clients, max(2, 2 * clients), seed=round_ + 1))
                samples[name][clients].append(result)
                print(f"round {round_} {name} {clients} clients: {result}", file=sys.stderr)
    return {
        name: {
            str(clients): {key: statistics.median(r[key] for r in runs) for key in runs[0]}
            for clients, runs in by_clients.items()
        }
        for name, by_clients in samples.items()
    }


def family(root: int) -> list[int]:
    """A process and all below it."""
    tasks = Path(f"/proc/{root}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [root, *(pid for child in children for pid in family(child))]


@contextlib.contextmanager
def paused(roots: list[int]) -> Iterator[None]:
    """Stops servers that are not being measured: one that spins while idle would slow the other."""
    pids = [pid for root in roots for pid in family(root)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def processes_with_jax(root: int) -> list[str]:
    """Which processes of a server have jax's library mapped."""
    return [
        " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[1:]).strip()
        for pid in family(root)
        if "libjax_common" in Path(f"/proc/{pid}/maps").read_text()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="folder of peer_vllm_cpu.sh, with its environment and model")
    parser.add_argument("--peer-script", default=str(REPOSITORY.parent / "shared/tools/peer_vllm_cpu.sh"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8050)
    parser.add_argument("--output", default=str(REPOSITORY / "benchmarks/results/cpu/serving_cpu.json"))
    args = parser.parse_args()

    report: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as programs, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(args.port), "--program-cache-dir", programs]
        with server(command, args.port, "jaxserve") as (_, seconds):
            report["start_first_s"] = seconds
        pid, report["start_cached_s"] = stack.enter_context(server(command, args.port, "jaxserve"))
        servers = {"jaxserve": (pid, args.port, "smollm2-135m-instruct")}
        if args.peer:
            peer_port = args.port + 1
            peer = ["bash", args.peer_script, "serve", args.peer, str(peer_port)]
            peer_pid, report["start_peer_s"] = stack.enter_context(server(peer, peer_port, "vllm"))
            servers["vllm"] = (peer_pid, peer_port, "smollm2")
        report["results"] = measure(servers, args.rounds)
        report["processes_with_jax"] = processes_with_jax(pid)
        metrics = httpx.get(f"http://127.0.0.1:{args.port}/metrics").text
        report["compiles_after_ready"] = [line for line in metrics.splitlines() if "compiles_after_ready" in line][-1]
    print_report(report)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


def print_report(report: dict[str, Any]) -> None:
    print(f"start to ready: first {report['start_first_s']:.1f} s, cached {report['start_cached_s']:.1f} s", end="")
    print(f", vLLM {report['start_peer_s']:.1f} s" if "start_peer_s" in report else "")
    print(f"{'clients':>8} {'server':>10} {'output tok/s':>13} {'TTFT ms':>9} {'TPOT ms':>9}")
    for clients in map(str, CLIENTS):
        for name, results in report["results"].items():
            row = results[clients]
            print(f"{clients:>8} {name:>10} {row['output_tok_s']:13.1f} {row['ttft_ms']:9.1f} {row['tpot_ms']:9.1f}")
        if "vllm" in report["results"]:
            ours, peer = report["results"]["jaxserve"][clients], report["results"]["vllm"][clients]
            ratios = [ours[key] / peer[key] for key in ("output_tok_s", "ttft_ms", "tpot_ms")]
            print(f"{clients:>8} {'ratio':>10} {ratios[0]:13.2f} {ratios[1]:9.2f} {ratios[2]:9.2f}")
    print(f"processes with jax: {report['processes_with_jax']}; {report['compiles_after_ready']}")


if __name__ == "__main__":
    main()
