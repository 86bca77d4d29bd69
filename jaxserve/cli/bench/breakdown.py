"""Formats the time of an engine step by phase for `bench latency --breakdown`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from jaxserve.bench.engine.step_times import ProfiledSteps, ProgramTimes
from jaxserve.cli.common.table import format_table

_LAYER = re.compile(r"layer_\d+")


def breakdown(steps: ProfiledSteps) -> str:
    """Return the breakdown as text: the engine's thread, then each program that ran."""
    host = [[name, f"{ms:.3f}", f"{ms / steps.wall_ms:.1%}"] for name, ms in steps.host_ms.items()]
    host.append(["other", f"{steps.other_ms:.3f}", f"{steps.other_ms / steps.wall_ms:.1%}"])
    host.append(["a step", f"{steps.wall_ms:.3f}", "100.0%"])
    parts = [
        f"Profiled: {steps.num_steps} steps. Recording slows them down: read the shares, not the totals.",
        format_table([f"the engine's thread, mean of {steps.num_steps} steps", "ms", "share"], host),
        *map(_program, steps.programs),
    ]
    if not steps.programs:
        parts.append("The device: unknown, because this platform's trace has no times of operations.")
    return "\n\n".join(parts)


def _program(program: ProgramTimes) -> str:
    """Return the table of one program, with layers summed by scope."""
    total = sum(program.scopes_ms.values())
    by_name, layers = _without_layers(program.scopes_ms)
    rows = [
        [name if not layers[name] else f"{name}, {layers[name]} layers", f"{ms:.3f}", f"{ms / total:.1%}"]
        for name, ms in sorted(by_name.items(), key=lambda item: -item[1])
    ]
    count = "all its runs" if program.runs is None else f"mean of {program.runs} runs"
    rows.append(["sum of operations", f"{total:.3f}", "100.0%"])
    rows.append(["time on the device", f"{program.busy_ms:.3f}", ""])
    return format_table([f"{program.name}, {count}", "ms", "share"], rows)


def _without_layers(scopes: Mapping[str, float]) -> tuple[dict[str, float], dict[str, int]]:
    """Return milliseconds by scope without layer numbers, and the number of layers of each scope."""
    times: dict[str, float] = defaultdict(float)
    layers: dict[str, set[str]] = defaultdict(set)
    for scope, ms in scopes.items():
        first, _, rest = scope.partition("/")
        name = scope
        if _LAYER.fullmatch(first):
            name = rest or "norms and residuals"
            layers[name].add(first)
        times[name] += ms
    return dict(times), {name: len(layers[name]) for name in times}
