"""Times one start of a server by phase, from the command to the first 200 of /ready.

The phases of the engine process come from /server_info, the rest from this process's clock.
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
"""The engine's own phase that covers all others: from the start of its process until it is ready."""


@dataclasses.dataclass(frozen=True)
class StartupTimes:
    """Seconds of one start. `total` lasts until /ready returns 200; `engine` holds the phases of the engine process
    (weights, state and programs overlap); `api` is the time before that process starts and after it is ready."""

    total: float
    api: float
    engine: Mapping[str, float]
    num_programs: int
    num_compiled_programs: int


def measure_startup(flags: Sequence[str], log: Path, *, timeout: float, command: Sequence[str] = SERVE) -> StartupTimes:
    """Start `jaxserve serve` with these flags, read its phases and stop it. Raises `BenchRunError`."""
    begin = time.monotonic()
    with serving(flags, log, timeout=timeout, command=command, poll=0.01) as server:
        total = time.monotonic() - begin
        try:
            info: dict[str, Any] = httpx.get(f"{server.url}/server_info", timeout=30.0).raise_for_status().json()
            engine = info["engine"]
            phases = {name: float(seconds) for name, seconds in engine["startup_seconds"].items()}
            return StartupTimes(
                total=total,
                api=total - phases[ENGINE],
                engine=phases,
                num_programs=engine["num_programs"],
                num_compiled_programs=engine["num_compiled_programs"],
            )
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise BenchRunError(f"/server_info has no start-up times: {type(error).__name__} {error}") from None
