"""What `bench tune` found as a YAML profile for `jaxserve serve --config`, with the reason beside each setting."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
from collections.abc import Iterator, Sequence

from jaxserve.bench.results.compare import verdict
from jaxserve.bench.sweep.grid import Options
from jaxserve.bench.sweep.run_sweep import described
from jaxserve.bench.tune.goal import Goal
from jaxserve.bench.tune.run_tune import CONFIDENCE, MIN_GAIN, Trial, Tuned, ratio_text

# Relative standard deviation from which three runs find no usual gain any more.
MUCH_NOISE = 0.1


def profile(base: Options, tuned: Tuned, goal: Goal, flags: Sequence[str], today: datetime.date) -> str:
    """The file's text. `base` are the settings that were there before, `flags` the load's."""
    settings = dict(base) | dict(tuned.changes)
    lines = [f"# {line}" for line in _head(tuned, goal, flags, today)]
    for key, value in settings.items():
        lines += ["", *(f"# {line}" for line in _reasons(key, tuned)), _entry(key, value)]
    left = [line for key in _keys(tuned) if key not in settings for line in _reasons(key, tuned)]
    if left:
        lines += ["", "# Left as they are:", *(f"# {line}" for line in left)]
    return "\n".join(lines) + "\n"


def _head(tuned: Tuned, goal: Goal, flags: Sequence[str], today: datetime.date) -> Iterator[str]:
    yield f"Made by jaxserve bench tune on {today.isoformat()}, in {tuned.seconds / 60:.1f} minutes of measured runs."
    yield f"Goal: {goal.name}, {goal.unit}. Load: {shlex.join(flags)}"
    yield (
        f"Default: {statistics.fmean(tuned.default):.4g} {goal.unit} over {len(tuned.default)} runs that vary by "
        f"{tuned.noise:.1%}. Ratios below are with their bounds at {CONFIDENCE:.0%}."
    )
    if tuned.noise > MUCH_NOISE:
        yield "So much noise hides all but large gains: something else was at work here, or the runs are too short."
    if tuned.check is not None:
        yield f"Result against default, both on fresh servers: {ratio_text(tuned.check)}."
        if verdict(tuned.check, True, MIN_GAIN) != "faster":
            yield "That is not beyond noise, so nothing is changed."
    elif tuned.changes:
        yield "The time was up before default and result could meet once more: each ratio below stands alone."
    else:
        yield "No candidate was better beyond noise: nothing is changed."


def _reasons(key: str, tuned: Tuned) -> Iterator[str]:
    for trial in tuned.trials:
        if key in trial.change:
            yield _reason(trial, tuned)
    if key in tuned.skipped:
        yield f"{key}: {tuned.skipped[key]}."


def _reason(trial: Trial, tuned: Tuned) -> str:
    kept = trial.kept and bool(tuned.changes)
    return f"{described(trial.change)}: {trial.why}{': kept' if kept else ''}."


def _keys(tuned: Tuned) -> list[str]:
    tried = [key for trial in tuned.trials for key in trial.change]
    return list(dict.fromkeys([*tried, *tuned.skipped]))


def _entry(key: str, value: object) -> str:
    """JSON's values are YAML's too."""
    return f"{key}: {json.dumps(value)}"
