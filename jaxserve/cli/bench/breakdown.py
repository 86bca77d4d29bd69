"""Where the time of a step goes, as `bench latency --breakdown` prints it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from jaxserve.bench.engine.step_times import ProgramTimes, StepTimes
from jaxserve.cli.common.table import table

_LAYER = re.compile(r"layer_\d+")


def breakdown(steps: StepTimes) -> str:
    """Text for a terminal: the engine's thread, then each program that ran."""
    host = [[name, f"{ms:.3f}", f"{ms / steps.wall_ms:.1%}"] for name, ms in steps.host_ms.items()]
    host.append(["anything else", f"{steps.other_ms:.3f}", f"{steps.other_ms / steps.wall_ms:.1%}"])
    host.append(["a step", f"{steps.wall_ms:.3f}", "100.0%"])
    parts = [
        f"Profiled: {steps.num_steps} steps. Recording slows them down; shares count, not sums.",
        table([f"the engine's thread, mean of {steps.num_steps} steps", "ms", "share"], host),
        *map(_program, steps.programs),
    ]
    if not steps.programs:
        parts.append("The device: this platform's trace has no times of operations, so there is nothing to say of it.")
    return "\n\n".join(parts)


def _program(program: ProgramTimes) -> str:
    """Layers are added up, by what is in them."""
    total = sum(program.scopes_ms.values())
    by_name, layers = _without_layers(program.scopes_ms)
    rows = [
        [name if not layers[name] else f"{name}, {layers[name]} layers", f"{ms:.3f}", f"{ms / total:.1%}"]
        for name, ms in sorted(by_name.items(), key=lambda item: -item[1])
    ]
    count = "all its runs" if program.runs is None else f"mean of {program.runs} runs"
    rows.append(["operations, added up", f"{total:.3f}", "100.0%"])
    rows.append(["under way on the device", f"{program.busy_ms:.3f}", ""])
    return table([f"{program.name}, {count}", "ms", "share"], rows)


def _without_layers(scopes: Mapping[str, float]) -> tuple[dict[str, float], dict[str, int]]:
    """Milliseconds by scope with the number of the layer taken out, and from how many layers they are."""
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
