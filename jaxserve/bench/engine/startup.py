"""One start of a server, from the command to the first 200 of /health, by the phases that it and we can see.

What the engine process says of itself comes from /server_info; the rest are our own clock and the server's log.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from jaxserve.bench.processes.server_process import SERVE, serving
from jaxserve.errors import BenchRunError

ENGINE = "engine"
"""Among the phases that the engine tells: from the moment its process was started until it stood."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Seconds of one start. `total` until /health answered 200; `engine` are the phases of the engine's process, of
    which weights, state and programs overlap; `api` is what came before that process and after it was ready."""

    total: float
    api: float
    engine: Mapping[str, float]
    num_programs: int
    num_compiled_programs: int


def start_once(flags: Sequence[str], log: Path, *, timeout: float, command: Sequence[str] = SERVE) -> Start:
    """Start `jaxserve serve` with these flags, read what it says and end it. Raises `BenchRunError`."""
    begin = time.monotonic()
    with serving(flags, log, timeout=timeout, command=command, poll=0.01) as server:
        total = time.monotonic() - begin
        try:
            info: dict[str, Any] = httpx.get(f"{server.url}/server_info", timeout=30.0).raise_for_status().json()
            engine = info["engine"]
            phases = {name: float(seconds) for name, seconds in engine["startup_seconds"].items()}
            return Start(
                total=total,
                api=total - phases[ENGINE],
                engine=phases,
                num_programs=engine["num_programs"],
                num_compiled_programs=engine["num_compiled_programs"],
            )
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise BenchRunError(f"the server doesn't say how it started: {type(error).__name__} {error}") from None
