"""Writes the result of `bench tune` as a YAML profile for `jaxserve serve --config`, with a reason for each setting."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
from collections.abc import Iterator, Sequence

from jaxserve.bench.results.compare import verdict
from jaxserve.bench.sweep.grid import Options
from jaxserve.bench.sweep.run_sweep import format_options
from jaxserve.bench.tune.goal import Goal
from jaxserve.bench.tune.run_tune import CONFIDENCE, MIN_GAIN, Trial, TuningResult, format_interval

# At this relative standard deviation three runs can't detect gains of the usual size.
HIGH_NOISE = 0.1


def profile_text(base: Options, tuned: TuningResult, goal: Goal, flags: Sequence[str], today: datetime.date) -> str:
    """Return the file's text. `base` are the settings before the search, `flags` those of the load."""
    settings = dict(base) | dict(tuned.changes)
    lines = [f"# {line}" for line in _head(tuned, goal, flags, today)]
    for key, value in settings.items():
        lines += ["", *(f"# {line}" for line in _reasons(key, tuned)), _entry(key, value)]
    left = [line for key in _keys(tuned) if key not in settings for line in _reasons(key, tuned)]
    if left:
        lines += ["", "# Left as they are:", *(f"# {line}" for line in left)]
    return "\n".join(lines) + "\n"


def _head(tuned: TuningResult, goal: Goal, flags: Sequence[str], today: datetime.date) -> Iterator[str]:
    yield f"Made by jaxserve bench tune on {today.isoformat()}, in {tuned.seconds / 60:.1f} minutes of measured runs."
    yield f"Goal: {goal.name}, {goal.unit}. Load: {shlex.join(flags)}"
    yield (
        f"Default: {statistics.fmean(tuned.default):.4g} {goal.unit} over {len(tuned.default)} runs that vary by "
        f"{tuned.noise:.1%}. Ratios below are with their bounds at {CONFIDENCE:.0%}."
    )
    if tuned.noise > HIGH_NOISE:
        yield "So much noise hides all but large gains: the machine had other work, or the runs are too short."
    if tuned.final_comparison is not None:
        yield f"Result against default, both on fresh servers: {format_interval(tuned.final_comparison)}."
        if verdict(tuned.final_comparison, True, MIN_GAIN) != "faster":
            yield "That is not beyond noise, so nothing is changed."
    elif tuned.changes:
        yield "The time was up before the final comparison of default and result: trust each ratio below only alone."
    else:
        yield "No candidate was better beyond noise: nothing is changed."


def _reasons(key: str, tuned: TuningResult) -> Iterator[str]:
    for trial in tuned.trials:
        if key in trial.change:
            yield _reason(trial, tuned)
    if key in tuned.skipped:
        yield f"{key}: {tuned.skipped[key]}."


def _reason(trial: Trial, tuned: TuningResult) -> str:
    kept = trial.kept and bool(tuned.changes)
    return f"{format_options(trial.change)}: {trial.why}{': kept' if kept else ''}."


def _keys(tuned: TuningResult) -> list[str]:
    tried = [key for trial in tuned.trials for key in trial.change]
    return list(dict.fromkeys([*tried, *tuned.skipped]))


def _entry(key: str, value: object) -> str:
    """Return one line of YAML; JSON values are valid YAML."""
    return f"{key}: {json.dumps(value)}"
