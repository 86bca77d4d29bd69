"""Makes one measured run: `jaxserve bench serve` against a server. Its result file is either complete or absent."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from jaxserve.bench.processes.server_process import BENCH_SERVE, ServerProcess, last_lines, run_client
from jaxserve.errors import BenchRunError

_FLUSH_TIMEOUT = 60.0
# After the engine has died, clients fail a little before the server logs the reason and ends.
_SERVER_END_TIME = 2.0


def measure(
    server: ServerProcess, flags: Sequence[str], output: Path, *, timeout: float, command: Sequence[str] = BENCH_SERVE
) -> dict[str, Any]:
    """Run a load, write its result to `output` and its log beside it, and return the result. Raises `BenchRunError`.

    The prefix cache is flushed first, so that no run reuses what an earlier one computed.
    """
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/flush_cache", timeout=_FLUSH_TIMEOUT)
    part = output.with_suffix(".part")
    part.unlink(missing_ok=True)
    log = output.with_suffix(".log")
    arguments = [*command, "--base-url", server.url, *flags, "--disable-tqdm", "--output-json", str(part)]
    try:
        run_client(arguments, log, timeout=timeout)
    except BenchRunError:
        if server.ends_within(_SERVER_END_TIME):
            raise BenchRunError(f"the server ended during the run: {last_lines(server.log)}") from None
        raise
    if not server.is_alive:
        raise BenchRunError(f"the server ended during the run: {last_lines(server.log)}")
    result = _read(part)
    if result.get("interrupted"):
        raise BenchRunError(f"the run was interrupted (log: {log})")
    if not result.get("completed"):
        raise BenchRunError(f"no request was answered (log: {log})")
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(output)
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchRunError(f"bench serve left no result: {error}") from None
    if not isinstance(content, dict):
        raise BenchRunError(f"bench serve left no result in {path}")
    return content
