"""Stand-ins for the processes of a sweep: real processes that are ready and write results immediately.

`python -m tests.bench.stand_in serve|load|sweep|tune …`. The server answers with its flags; the load computes its
result from them, so that the best settings are known. A server with `max_running_requests` 13 fails to start; a load of
13 prompts fails, one of 14 kills its server. With the environment variable STAND_IN_FIFO, a load with seed 1 writes
half a result, reports this to the FIFO and waits forever. The server keeps the FIFO open too: its end shows that both
ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

SERVE = (sys.executable, "-m", "tests.bench.stand_in", "serve")
LOAD = (sys.executable, "-m", "tests.bench.stand_in", "load")
FIFO = os.environ.get("STAND_IN_FIFO")


def serve(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-running-requests", type=int, default=8)
    parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
    settings = vars(parser.parse_known_args(argv)[0])
    if settings["max_running_requests"] == 13:
        sys.exit("can't start with 13")
    fifo = open(FIFO, "w") if FIFO else None  # noqa: SIM115

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(info(settings)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if self.path == "/die":
                os._exit(9)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    HTTPServer(("127.0.0.1", settings["port"]), Answer).serve_forever()
    assert fifo is None


def info(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of /server_info: all decode steps have 3 rows, in a program of 8."""
    return {
        "settings": settings,
        "engine": {
            "max_running_requests": settings["max_running_requests"], "chunked_prefill_size": 512,
            "max_total_num_tokens": 100_000, "schedule_policy": "lpm",
        },
        "engine_config": {"schedule_conservativeness": 1.0},
        "stats": {
            "num_preemptions": 0, "decode_steps_by_rows": {"3": 100}, "decode_rows": 300, "decode_bucket_rows": 800,
        },
    }  # fmt: skip


def load(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--max-concurrency", type=int, default=8)
    given = parser.parse_known_args(argv)[0]
    if given.num_prompts == 13:
        sys.exit("13 is no good number")
    if given.num_prompts == 14:
        urllib.request.urlopen(f"{given.base_url}/die").read()
    if FIFO and given.seed == 1:
        given.output_json.write_text('{"completed": 1')
        with open(FIFO, "w") as fifo:
            print("half", file=fifo, flush=True)
            signal.pause()
    with urllib.request.urlopen(f"{given.base_url}/server_info") as answer:
        settings = json.load(answer)["settings"]
    # Twice the requests are 10 % faster, up to 16; a program of exactly the right size another 10 %.
    speed = 1.1 ** min(settings["max_running_requests"] // 8, 2)
    if 3 in (settings["cuda_graph_bs"] or ()):
        speed *= 1.1
    from tests.bench.result_files import serve_result  # numpy is slow to import, and the server needs none

    result = serve_result(
        given.seed, ttft=0.1 / speed, itl=0.02 / speed, requests=given.num_prompts, clients=given.max_concurrency
    )
    given.output_json.write_text(json.dumps(result | {"max_concurrent_requests": given.max_concurrency}))


def main(argv: list[str]) -> int:
    from jaxserve.bench.sweep.run_sweep import BenchCommands
    from jaxserve.cli.bench import sweep, tune
    from jaxserve.errors import JaxserveError

    name, rest = argv[0], argv[1:]
    if name in ("serve", "load"):
        {"serve": serve, "load": load}[name](rest)
        return 0
    try:
        return {"sweep": sweep, "tune": tune}[name].main(rest, BenchCommands(SERVE, LOAD))
    except JaxserveError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
