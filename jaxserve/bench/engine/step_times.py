"""Splits the time of engine steps, from a profile: host phases, and device time by program, layer and phase.

It reads the files that `/stop_profile` wrote, without jax. On a GPU or a TPU it takes the device's own lines; on a CPU
the operations that XLA's threads ran. The time of a nested operation counts for that operation only.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import BenchRunError
from jaxserve.observability.timeline import HOST_PHASES

# jax writes at most this many events into a trace and drops the rest.
_MAX_EVENTS = 1_000_000
_UNNAMED = "unnamed"


@dataclasses.dataclass(frozen=True)
class ProgramTimes:
    """The times of one program: milliseconds per run in which any of its operations ran (`busy_ms`), and the time of
    its operations by scope, summed over threads (`scopes_ms`). `runs` is None if the trace doesn't separate runs; the
    times are then the sum of all runs."""

    name: str
    runs: int | None
    busy_ms: float
    scopes_ms: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class ProfiledSteps:
    """Milliseconds per step. `wall_ms` is the time from the first phase of the first step to the end of the last phase
    of the last step, divided by the number of steps."""

    num_steps: int
    wall_ms: float
    host_ms: Mapping[str, float]
    programs: Sequence[ProgramTimes]

    @property
    def other_ms(self) -> float:
        """Time of the engine's thread that no phase covers."""
        return self.wall_ms - sum(self.host_ms.values())


def read_step_times(folder: Path) -> ProfiledSteps:
    """Return the times of a profile's folder. Raises `BenchRunError` if it can't be read or holds no steps."""
    try:
        [trace] = folder.glob("*.trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        scopes = json.loads(gzip.decompress((folder / "scopes.json.gz").read_bytes()))
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise BenchRunError(f"{folder} holds no profile of an engine that can be read: {error}") from None
    if len(events) >= _MAX_EVENTS:
        raise BenchRunError(f"the trace in {folder} is too long, jax has dropped events of it: profile fewer steps")
    return step_times(events, scopes)


def step_times(events: Iterable[Mapping[str, Any]], scopes: Mapping[str, Mapping[str, str]]) -> ProfiledSteps:
    """Return the times in a trace's events. `scopes` maps each program's operations to their scopes."""
    processes: dict[Any, str] = {}
    threads: dict[Any, str] = {}
    spans, operations = [], []
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event.get("ph") == "X" and event["name"] in HOST_PHASES:
            spans.append(event)
        elif event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            operations.append(event)
    num_steps = sum(event["name"] == "wait" for event in spans)
    if not num_steps:
        raise BenchRunError("the profile holds no step of an engine")
    host: dict[str, float] = dict.fromkeys(HOST_PHASES, 0.0)
    for event in spans:
        host[event["name"]] += event["dur"] / 1e3 / num_steps
    wall = max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans)
    # Each operation must count once: prefer a device's line of operations, then its streams, then the host's threads.
    device = [event for event in operations if processes.get(event["pid"], "").startswith("/device:")] or operations
    device = [event for event in device if threads.get((event["pid"], event["tid"])) == "XLA Ops"] or device
    return ProfiledSteps(num_steps, wall / 1e3 / num_steps, host, _programs(device, scopes))


def _programs(operations: list[Any], scopes: Mapping[str, Mapping[str, str]]) -> list[ProgramTimes]:
    by_module: dict[str, list[Any]] = defaultdict(list)
    for event in operations:
        by_module[event["args"].get("hlo_module", "")].append(event)
    programs = []
    for module, found in by_module.items():
        runs = len({event["args"]["run_id"] for event in found if "run_id" in event["args"]})
        times: dict[str, float] = defaultdict(float)
        for event, exclusive in _exclusive_times(found):
            scope = scopes.get(module, {}).get(event["args"]["hlo_op"], "")
            times[_scope_name(scope)] += exclusive / 1e3 / (runs or 1)
        busy = _busy_time(found) / 1e3 / (runs or 1)
        programs.append(ProgramTimes(module.removeprefix("jit_"), runs or None, busy, dict(times)))
    return sorted(programs, key=lambda one: -one.busy_ms * (one.runs or 1))


def _scope_name(scope: str) -> str:
    """Return `layer_3/attention` for operations of a layer, else the outermost scope."""
    parts = scope.split("/")
    return "/".join(parts[: 2 if parts[0].startswith("layer_") else 1]) or _UNNAMED


def _exclusive_times(events: list[Any]) -> Iterable[tuple[Any, float]]:
    """Yield each operation with its microseconds outside of the operations nested in it."""
    lines: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        lines[event["pid"], event["tid"]].append(event)
    for line in lines.values():
        line.sort(key=lambda event: (event["ts"], -event["dur"]))
        exclusive = [event["dur"] for event in line]
        open_: list[int] = []  # the enclosing operations, the innermost last
        for i, event in enumerate(line):
            while open_ and event["ts"] >= line[open_[-1]]["ts"] + line[open_[-1]]["dur"]:
                open_.pop()
            if open_:
                exclusive[open_[-1]] = max(exclusive[open_[-1]] - event["dur"], 0.0)
            open_.append(i)
        yield from zip(line, exclusive)


def _busy_time(events: list[Any]) -> float:
    """Return the microseconds in which at least one of the operations ran."""
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        covered += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    return covered
