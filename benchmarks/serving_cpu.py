"""jaxserve beside vLLM on this CPU: SmolLM2-135M, under four loads, in one run.

Both servers stay up and are loaded in turn, the other one stopped meanwhile, so that what else the machine does falls
on both alike; medians of the rounds are compared. Without `--peer DIR` (a folder made by
shared/tools/peer_vllm_cpu.sh) only jaxserve is measured.

    python benchmarks/serving_cpu.py --peer /tmp/peer --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
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
import psutil

REPOSITORY = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Load:
    """`requests` of so many prompt tokens, the first `shared` of them the same in all, `clients` at a time."""

    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared: int = 0


LOADS = {
    "1": Load(clients=1, requests=2, prompt_tokens=128, output_tokens=64),
    "16": Load(clients=16, requests=32, prompt_tokens=128, output_tokens=64),
    "1 long prompt": Load(clients=1, requests=3, prompt_tokens=1000, output_tokens=4),
    "32 shared prefix": Load(clients=32, requests=64, prompt_tokens=600, output_tokens=64, shared=500),
}


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


async def one_request(port: int, model: str, prompt: list[int], output_tokens: int) -> dict[str, float]:
    """Seconds to the first token and to the last, and how many came.

    Reads the socket itself: a comfortable client's own work, on the two cores the servers compute on, would be measured
    with theirs.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
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


async def run(port: int, model: str, load: Load, seed: int) -> dict[str, float]:
    """The load once, with prompts of its own for each seed."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, 49000) for _ in range(load.shared)]
    own = load.prompt_tokens - load.shared
    prompts = [[*shared, *(rng.randrange(100, 49000) for _ in range(own))] for _ in range(load.requests)]
    results: list[dict[str, float]] = []

    async def client() -> None:
        while prompts:
            results.append(await one_request(port, model, prompts.pop(), load.output_tokens))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    seconds = time.perf_counter() - start
    assert all(result["tokens"] == load.output_tokens for result in results), "a request came back short"
    return {
        "output_tok_s": sum(result["tokens"] for result in results) / seconds,
        "ttft_ms": 1e3 * statistics.median(result["ttft"] for result in results),
        "tpot_ms": 1e3 * statistics.median((r["end"] - r["ttft"]) / (r["tokens"] - 1) for r in results),
    }


def measure(
    servers: dict[str, tuple[int, int, str]], loads: dict[str, Load], rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over rounds by server and load; the servers take turns within a round."""
    samples: dict[str, dict[str, list[dict[str, float]]]] = {name: {load: [] for load in loads} for name in servers}
    for round_ in range(-1, rounds):
        for load_name, load in loads.items():
            for name, (pid, port, model) in servers.items():
                with paused([other for other, _, _ in servers.values() if other != pid]):
                    result = asyncio.run(run(port, model, load, seed=round_ + 1))
                if round_ < 0:
                    print(f"warmed up {name} with {load_name}", file=sys.stderr)
                    continue
                samples[name][load_name].append(result)
                print(f"round {round_} {name}, {load_name}: {result}", file=sys.stderr)
    return {
        name: {
            load_name: {key: statistics.median(r[key] for r in runs) for key in runs[0]}
            for load_name, runs in by_load.items()
        }
        for name, by_load in samples.items()
    }


def family(root: int) -> list[int]:
    """A process and all below it."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]


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
    """Which processes of a server have jax's library mapped; none where the system doesn't say what is."""
    processes = [psutil.Process(pid) for pid in family(root)]
    return [
        " ".join(process.cmdline()[1:])
        for process in processes
        if hasattr(process, "memory_maps") and any("libjax_common" in file.path for file in process.memory_maps())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="folder of peer_vllm_cpu.sh, with its environment and model")
    parser.add_argument("--peer-script", default=str(REPOSITORY.parent / "shared/tools/peer_vllm_cpu.sh"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="append", choices=list(LOADS), help="only this one; may be given again")
    parser.add_argument("--port", type=int, default=8050)
    parser.add_argument("--output", default=str(REPOSITORY / "benchmarks/results/cpu/serving_cpu.json"))
    args = parser.parse_args()

    loads = {name: load for name, load in LOADS.items() if not args.load or name in args.load}
    report: dict[str, Any] = {
        "loads": {name: dataclasses.asdict(load) for name, load in loads.items()},
        "rounds": args.rounds,
        "machine_load_at_start": os.getloadavg()[0],
    }
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
        report["results"] = measure(servers, loads, args.rounds)
        report["processes_with_jax"] = processes_with_jax(pid)
        metrics = httpx.get(f"http://127.0.0.1:{args.port}/metrics").text
        report["compiles_after_ready"] = [line for line in metrics.splitlines() if "compiles_after_ready" in line][-1]
    print_report(report)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


def print_report(report: dict[str, Any]) -> None:
    print(f"start to ready: first {report['start_first_s']:.1f} s, cached {report['start_cached_s']:.1f} s", end="")
    print(f", vLLM {report['start_peer_s']:.1f} s" if "start_peer_s" in report else "")
    print(f"{'load':>17} {'server':>10} {'output tok/s':>13} {'TTFT ms':>9} {'TPOT ms':>9}")
    for load in report["loads"]:
        for name, results in report["results"].items():
            row = results[load]
            print(f"{load:>17} {name:>10} {row['output_tok_s']:13.1f} {row['ttft_ms']:9.1f} {row['tpot_ms']:9.1f}")
        if "vllm" in report["results"]:
            ours, peer = report["results"]["jaxserve"][load], report["results"]["vllm"][load]
            ratios = [ours[key] / peer[key] for key in ("output_tok_s", "ttft_ms", "tpot_ms")]
            print(f"{load:>17} {'ratio':>10} {ratios[0]:13.2f} {ratios[1]:9.2f} {ratios[2]:9.2f}")
    print(f"processes with jax: {report['processes_with_jax']}; {report['compiles_after_ready']}")


if __name__ == "__main__":
    main()
