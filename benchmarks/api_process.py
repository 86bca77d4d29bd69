"""What the API process costs: a real server (HTTP, SSE, SmolLM2's tokenizer, metrics) whose engine is `paced_engine`,
which sends tokens at a set rate, read by a client process that does nothing but note when bytes arrived.

By load: the share of one core that the API process takes, microseconds of it a token, and the latency it adds, from
the engine's sending of a step's message to a client's receiving each token in it. Processor time is what the kernel
counted for the process; latencies are of the wall, so of whatever else the machine does ("no core": the part of the
time that the process was ready to run and had to wait): on a busy machine, run it under `chrt --fifo 5`. Medians over
rounds.

    python -m benchmarks.api_process --rounds 5 --json benchmarks/results/cpu/api_process.json
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import dataclasses
import gc
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.paced_engine import FOLDER
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.engine.client import EngineClient
from jaxserve.model_source import resolve
from jaxserve.observability import log
from jaxserve.server.lifecycle import serve
from jaxserve.server.server_state import Loaded
from jaxserve.text.template_process import TemplateProcess
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

MODEL = EngineConfig().model
TOKEN_BYTES = 5  # of every token given out, so that text says how many tokens it is
SETTLE = 1.0
WORDS = "the server reads a prompt of some sixty four tokens and then it streams what the engine says, word by word, "


@dataclasses.dataclass(frozen=True)
class Load:
    """So many streams of one route, each at `rate` tokens a second."""

    name: str
    route: str
    streams: int
    rate: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_STOPS = {"stop": ["\n\nQuestion:", "###", "<end>"]}
LOADS = (
    Load("completions", _COMPLETIONS, 64, 31.25),
    Load("chat", _CHAT, 64, 31.25),
    Load("chat, stop strings", _CHAT, 64, 31.25, _STOPS),
    Load("chat, 5 logprobs", _CHAT, 64, 31.25, {"logprobs": True, "top_logprobs": 5}),
    Load("completions", _COMPLETIONS, 256, 30.0),
    Load("chat", _CHAT, 256, 30.0),
    Load("chat, a fast engine", _CHAT, 256, 200.0),
)

COLUMNS = {
    "load": ("load", 18, ""),
    "streams": ("streams", 7, ""),
    "tok_s": ("tok/s", 6, ".0f"),
    "cpu_percent": ("CPU %", 5, ".1f"),
    "cpu_us_per_token": ("us/token", 8, ".1f"),
    "added_ms_p50": ("added ms p50", 12, ".2f"),
    "added_ms_p99": ("p99", 6, ".2f"),
    "no_core_percent": ("no core %", 9, ".1f"),
    "client_cpu_percent": ("client %", 8, ".1f"),
}


async def load_tokenizer_only(engine_config: EngineConfig, server_config: ServerConfig) -> Loaded:
    """The model's tokenizer and template, and the paced engine."""
    tokenizer = load_tokenizer(resolve(engine_config.model))
    template = tokenizer.chat_template or ""
    engine = await EngineClient.launch(engine_config, module="benchmarks.paced_engine")
    return Loaded(engine, tokenizer, TemplateProcess(template, tokenizer.special_tokens), template)


class Reader(asyncio.Protocol):
    """One stream: sends its request and keeps what comes with when it came."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self.pieces: list[tuple[float, bytes]] = []
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._message)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        if not self.begun.done():
            self.begun.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_result(None)

    def token_times(self) -> tuple[str, list[float]]:
        """The response's id, and when each token came. Raises `SystemExit` for an answer that isn't whole."""
        body = b"".join(data for _, data in self.pieces)
        if not body.startswith(b"HTTP/1.1 200") or body.count(b"data: [DONE]\n\n") != 1:
            sys.exit(f"a stream did not end well: {body[:300]!r} … {body[-300:]!r}")
        ends: list[int] = []
        for _, data in self.pieces:
            ends.append(len(data) + (ends[-1] if ends else 0))
        times: list[float] = []
        response_id = ""
        for event in re.finditer(rb"data: (\{.*\})\n\n", body):
            chunk = json.loads(event[1])
            response_id = chunk["id"]
            when = self.pieces[bisect.bisect_left(ends, event.end())][0]
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                times += [when] * (len(text) // TOKEN_BYTES)
        return response_id, times


@dataclasses.dataclass(frozen=True)
class Usage:
    """What the kernel has counted for a process by `when`: seconds on a core, seconds of waiting for one."""

    when: float
    cpu: float
    waited: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        return cls(time.monotonic(), cpu, waited)


async def read_streams(port: int, pid: int, load: Load, seconds: float) -> dict[str, Any]:
    """All streams from their start to their end; what the server used in `seconds` of it when all of them flow."""
    max_tokens = int(load.rate * (seconds + 3 * SETTLE))
    body: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | load.options
    readers: list[Reader] = []
    loop = asyncio.get_running_loop()
    for number in range(load.streams):
        text = f"{number}: {3 * WORDS}"
        body |= {"messages": [{"role": "user", "content": text}]} if load.route == _CHAT else {"prompt": text}
        content = json.dumps(body).encode()
        head = f"POST {load.route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        message = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
        readers.append((await loop.create_connection(lambda message=message: Reader(message), "127.0.0.1", port))[1])
    await asyncio.gather(*(reader.begun for reader in readers))
    await asyncio.sleep(SETTLE)
    gc.disable()  # a pause of this process would be counted as the server's
    before, own_before = Usage.of(pid), time.process_time()
    await asyncio.sleep(seconds)
    after, own_after = Usage.of(pid), time.process_time()
    await asyncio.gather(*(reader.ended for reader in readers))
    gc.enable()
    streams = [reader.token_times() for reader in readers]
    wrong = [len(times) for _, times in streams if len(times) != max_tokens]
    if wrong:
        sys.exit(f"{len(wrong)} of {load.streams} streams had another number of tokens than {max_tokens}: {wrong[:5]}")
    return {
        "window": [before.when, after.when],
        "cpu_s": after.cpu - before.cpu,
        "waited_s": after.waited - before.waited,
        "client_cpu_s": own_after - own_before,
        "streams": streams,
    }


def measured(result: dict[str, Any], steps: dict[str, Any]) -> dict[str, float]:
    """One round's figures, from what the client saw and when the engine sent it."""
    sent, first_step = steps["sent"], steps["first_step"]
    start, end = result["window"]
    added: list[float] = []
    for response_id, times in result["streams"]:
        first = first_step[f"{response_id}-0-0"]
        for when, left in zip(times, sent[first:]):
            if start <= left < end:
                added.append(when - left)
    quantiles = statistics.quantiles(added, n=100)
    seconds = end - start
    return {
        "tok_s": len(added) / seconds,
        "cpu_percent": 100 * result["cpu_s"] / seconds,
        "cpu_us_per_token": 1e6 * result["cpu_s"] / len(added),
        "added_ms_p50": 1e3 * quantiles[49],
        "added_ms_p99": 1e3 * quantiles[98],
        "no_core_percent": 100 * result["waited_s"] / seconds,
        "client_cpu_percent": 100 * result["client_cpu_s"] / seconds,
    }


@contextlib.contextmanager
def server(folder: Path, port: int) -> Iterator[int]:
    """The API process over a paced engine; its process id."""
    command = [sys.executable, "-m", "benchmarks.api_process", "--serve", str(port)]
    process = subprocess.Popen(command, env={**os.environ, FOLDER: str(folder)})
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as asked:
                asked.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
                if b" 200 " in asked.recv(100):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


def token_ids(tokenizer: Tokenizer) -> list[int]:
    """Words of four letters and the space before: the usual length of an English token."""
    assert tokenizer.pieces is not None
    found = []
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.pieces[token]
        if len(piece) == TOKEN_BYTES and piece[:1] == b" " and piece[1:].isalpha() and piece.isascii():
            found.append(token)
    return found


def measure(load: Load, ids: list[int], port: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Medians over rounds, on one server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps({"steps_per_second": load.rate, "token_ids": ids}))
        with server(folder, port) as pid:
            results = [uvloop.run(read_streams(port, pid, load, seconds)) for _ in range(rounds)]
        steps = json.loads((folder / "steps.json").read_text())
    runs = [measured(result, steps) for result in results]
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {"load": load.name, "streams": load.streams, **medians, "rounds": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured of each round")
    parser.add_argument("--only", type=int, nargs="*", choices=range(len(LOADS)), help="loads by number")
    parser.add_argument("--port", type=int, default=8070)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT", help="be the server: for this script itself")
    args = parser.parse_args()
    if args.serve is not None:
        log.setup("warning")
        sys.exit(serve(EngineConfig(), ServerConfig(port=args.serve), load=load_tokenizer_only))
    ids = token_ids(load_tokenizer(resolve(MODEL)))
    chosen = [LOADS[number] for number in args.only] if args.only else LOADS
    rows = []
    print("  ".join(f"{title:>{width}}" for title, width, _ in COLUMNS.values()))
    for load in chosen:
        row = measure(load, ids, args.port, args.rounds, args.seconds)
        rows.append(row)
        cells = (f"{row[key]:>{width}{form}}" for key, (_, width, form) in COLUMNS.items())
        print("  ".join(cells), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"seconds": args.seconds, "loads": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
