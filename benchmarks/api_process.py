"""Measures the API process: a real server (HTTP, SSE, SmolLM2's tokenizer, metrics) over `paced_engine`, which sends
tokens at a fixed rate, and a client process that only notes when bytes arrive.

For each load it reports medians over rounds of the share of one core that the API process uses, its microseconds per
token, and the latency it adds: from the engine's sending of a step's message to a client's receiving of each token in
it. Processor time is the kernel's count for the process. Latencies are wall time and include other activity of the
machine ("no_core_percent": the share of time in which the process was ready but had to wait for a core); on a busy
machine run it under `chrt --fifo 5`. With several API processes, the share of a core is that of the busiest one, and
the microseconds per token are those of all, the first process included.

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
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.paced_engine import FOLDER
from jaxserve.cli.common.table import format_records
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.model_source import resolve
from jaxserve.observability import log
from jaxserve.server.loading import EngineSource
from jaxserve.server.serve import serve
from jaxserve.server.server_state import LoadedModel
from jaxserve.text.answers.formats import choose_formats
from jaxserve.text.grammars.checking import GrammarChecker
from jaxserve.text.template_process import TemplateProcess
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

MODEL = EngineConfig().model
TOKEN_BYTES = 5  # every token has this length, so that the length of a text gives its number of tokens
SETTLE = 1.0
WORDS = "the server reads a prompt of some sixty four tokens and then it streams what the engine says, word by word, "


@dataclasses.dataclass(frozen=True)
class StreamLoad:
    """A number of streams on one route, each at `rate` tokens per second."""

    name: str
    route: str
    streams: int
    rate: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_CHAT, _COMPLETIONS, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
_ENDS = (b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n', b"event: response.incomplete\n")
_STOPS = {"stop": ["\n\nQuestion:", "###", "<end>"]}
LOADS = (
    StreamLoad("completions", _COMPLETIONS, 64, 31.25),
    StreamLoad("chat", _CHAT, 64, 31.25),
    StreamLoad("messages", _MESSAGES, 64, 31.25),
    StreamLoad("chat, stop strings", _CHAT, 64, 31.25, _STOPS),
    StreamLoad("chat, 5 logprobs", _CHAT, 64, 31.25, {"logprobs": True, "top_logprobs": 5}),
    StreamLoad("completions", _COMPLETIONS, 256, 30.0),
    StreamLoad("chat", _CHAT, 256, 30.0),
    StreamLoad("messages", _MESSAGES, 256, 30.0),
    StreamLoad("chat, a fast engine", _CHAT, 256, 200.0),
    StreamLoad("responses", _RESPONSES, 64, 31.25),
    StreamLoad("responses", _RESPONSES, 256, 30.0),
)

COLUMNS = ("load", "streams", "api_processes", "tok_s", "cpu_percent", "cpu_us_per_token", "added_ms_p50",
           "added_ms_p99", "no_core_percent", "client_cpu_percent")  # fmt: skip


async def load_tokenizer_only(
    engine_config: EngineConfig, server_config: ServerConfig, source: EngineSource
) -> LoadedModel:
    """Load the model's tokenizer and template, and start the paced engine."""
    tokenizer = load_tokenizer(resolve(engine_config.model))
    template = tokenizer.chat_template or ""
    engine = await source.start_engine()
    prompts = TemplateProcess(template, tokenizer.special_tokens)
    return LoadedModel(engine, tokenizer, prompts, template, GrammarChecker(tokenizer), choose_formats(template))


class StreamReader(asyncio.Protocol):
    """One stream: sends its request and keeps the received bytes with their arrival times."""

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
        """Return the response's id and the arrival time of each token. Raises `SystemExit` for an incomplete answer."""
        body = b"".join(data for _, data in self.pieces)
        if not body.startswith(b"HTTP/1.1 200") or sum(map(body.count, _ENDS)) != 1:
            sys.exit(f"a stream did not end well: {body[:300]!r} … {body[-300:]!r}")
        ends: list[int] = []
        for _, data in self.pieces:
            ends.append(len(data) + (ends[-1] if ends else 0))
        times: list[float] = []
        response_id = ""
        for event in re.finditer(rb"data: (\{.*\})\n\n", body):
            chunk = json.loads(event[1])
            outer = chunk.get("message") or chunk.get("response") or chunk
            response_id = outer.get("id") or response_id
            when = self.pieces[bisect.bisect_left(ends, event.end())][0]
            times += [when] * (sum(map(len, _texts(chunk))) // TOKEN_BYTES)
        return response_id, times


def _texts(event: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of an event of any route."""
    if event.get("type", "").startswith("response."):
        yield event["delta"] if event["type"] == "response.output_text.delta" else ""
        return
    for choice in event.get("choices", (event,)):
        yield choice.get("text") or choice.get("delta", {}).get("content") or choice.get("delta", {}).get("text") or ""


@dataclasses.dataclass(frozen=True)
class CpuUsage:
    """The kernel's counts for a process at the time `when`: seconds on a core, and seconds of waiting for one."""

    when: float
    cpu: float
    waited: float

    @classmethod
    def of(cls, pid: int) -> CpuUsage:
        threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        cpu, waited = (sum(int(thread[field]) for thread in threads) / 1e9 for field in (0, 1))
        return cls(time.monotonic(), cpu, waited)


async def read_streams(port: int, pids: list[int], load: StreamLoad, seconds: float) -> dict[str, Any]:
    """Read all streams to their end and measure the server's processes for `seconds` while all of them run."""
    max_tokens = int(load.rate * (seconds + 3 * SETTLE))
    limit = "max_output_tokens" if load.route == _RESPONSES else "max_tokens"
    body: dict[str, Any] = {"model": MODEL, limit: max_tokens, "stream": True} | load.options
    if load.route != _MESSAGES:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    readers: list[StreamReader] = []
    loop = asyncio.get_running_loop()
    for number in range(load.streams):
        text = f"{number}: {3 * WORDS}"
        messages = [{"role": "user", "content": text}]
        body |= {_COMPLETIONS: {"prompt": text}, _RESPONSES: {"input": text}}.get(load.route, {"messages": messages})
        content = json.dumps(body).encode()
        head = f"POST {load.route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        message = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
        _, reader = await loop.create_connection(lambda message=message: StreamReader(message), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader.begun for reader in readers))
    await asyncio.sleep(SETTLE)
    gc.disable()  # a pause of this process would count as latency of the server
    before, own_before = [CpuUsage.of(pid) for pid in pids], time.process_time()
    await asyncio.sleep(seconds)
    after, own_after = [CpuUsage.of(pid) for pid in pids], time.process_time()
    await asyncio.gather(*(reader.ended for reader in readers))
    gc.enable()
    streams = [reader.token_times() for reader in readers]
    wrong = [len(times) for _, times in streams if len(times) != max_tokens]
    if wrong:
        sys.exit(f"{len(wrong)} of {load.streams} streams did not have {max_tokens} tokens: {wrong[:5]}")
    used = [end.cpu - start.cpu for start, end in zip(before, after)]
    return {
        "window": [before[-1].when, after[0].when],
        "busiest_cpu_s": max(used),
        "cpu_s": sum(used),
        "waited_s": max(end.waited - start.waited for start, end in zip(before, after)),
        "client_cpu_s": own_after - own_before,
        "streams": streams,
    }


def round_figures(result: dict[str, Any], steps: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one round from the client's arrival times and the engine's sending times."""
    # An engine's request is named after its response, with three numbers behind
    sent, first_step = steps["sent"], {name.rsplit("-", 3)[0]: at for name, at in steps["first_step"].items()}
    start, end = result["window"]
    added: list[float] = []
    for response_id, times in result["streams"]:
        first = first_step[response_id]
        for when, left in zip(times, sent[first:]):
            if start <= left < end:
                added.append(when - left)
    quantiles = statistics.quantiles(added, n=100)
    seconds = end - start
    return {
        "tok_s": len(added) / seconds,
        "cpu_percent": 100 * result["busiest_cpu_s"] / seconds,
        "cpu_us_per_token": 1e6 * result["cpu_s"] / len(added),
        "added_ms_p50": 1e3 * quantiles[49],
        "added_ms_p99": 1e3 * quantiles[98],
        "no_core_percent": 100 * result["waited_s"] / seconds,
        "client_cpu_percent": 100 * result["client_cpu_s"] / seconds,
    }


@contextlib.contextmanager
def server(folder: Path, port: int, api_processes: int) -> Iterator[list[int]]:
    """Start API processes over a paced engine; yield the ids of the first process of the server and of its others."""
    command = [sys.executable, "-m", "benchmarks.api_process", "--serve", str(port)]
    command += ["--api-processes", str(api_processes)]
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
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info") as answer:
            own = [found["pid"] for found in json.load(answer)["api_processes"]]
        yield list({process.pid, *own})
    finally:
        process.terminate()
        process.wait(60)


def token_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of words of four letters with a leading space: the usual length of an English token."""
    assert tokenizer.byte_table is not None
    found = []
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.byte_table[token]
        if len(piece) == TOKEN_BYTES and piece[:1] == b" " and piece[1:].isalpha() and piece.isascii():
            found.append(token)
    return found


def measure(
    load: StreamLoad, ids: list[int], port: int, rounds: int, seconds: float, api_processes: int
) -> dict[str, Any]:
    """Return medians over rounds on one server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps({"steps_per_second": load.rate, "token_ids": ids}))
        with server(folder, port, api_processes) as pids:
            results = [uvloop.run(read_streams(port, pids, load, seconds)) for _ in range(rounds)]
        steps = json.loads((folder / "steps.json").read_text())
    runs = [round_figures(result, steps) for result in results]
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {"load": load.name, "streams": load.streams, "api_processes": api_processes, **medians, "rounds": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured seconds of each round")
    parser.add_argument("--only", type=int, nargs="*", choices=range(len(LOADS)), help="loads by number")
    parser.add_argument("--api-processes", type=int, nargs="*", default=[1], help="measure each of these numbers")
    parser.add_argument("--port", type=int, default=8070)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT", help="run the server; used by this script itself")
    args = parser.parse_args()
    if args.serve is not None:
        log.setup("warning")
        config = ServerConfig(port=args.serve, api_server_count=args.api_processes[0])
        sys.exit(serve(EngineConfig(), config, load=load_tokenizer_only, engine_module="benchmarks.paced_engine"))
    ids = token_ids(load_tokenizer(resolve(MODEL)))
    chosen = [LOADS[number] for number in args.only] if args.only else LOADS
    rows = [
        measure(load, ids, args.port, args.rounds, args.seconds, count)
        for load in chosen
        for count in args.api_processes
    ]
    print(format_records(rows, COLUMNS, decimals=2))
    if args.json:
        args.json.write_text(json.dumps({"seconds": args.seconds, "loads": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
