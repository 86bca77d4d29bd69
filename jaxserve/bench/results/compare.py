"""Compares two sides, each of one or several runs of the same load: ratios, confidence bounds, and verdicts.

With several runs per side the bounds come from the spread between runs. With one run per side they come from the spread
of its raw requests; differences from run to run are invisible then, so a verdict needs a larger difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from jaxserve.bench.results import intervals
from jaxserve.bench.results.intervals import Interval
from jaxserve.bench.results.resample import resample_metric
from jaxserve.bench.results.run_file import RunFile
from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError

Verdict = Literal["faster", "slower", "no difference beyond noise", "can't tell"]

CONFIDENCE = 0.99
# Differences below this many percent get no verdict: with one run per side, and with several.
MIN_DIFFERENCE_ONE_RUN = 5.0
MIN_DIFFERENCE = 1.0
# Mean token counts may differ by this share between runs of one load: by tokenizers and by answers that stop early.
_SAME_TOKENS = 0.03


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One metric: the values of both sides (geometric means over runs), the interval of B/A, and the verdict on B.

    `interval` is None when the files hold nothing to compute a spread from; `why` then says what is missing.
    """

    metric: str
    higher_is_better: bool
    a: float
    b: float
    interval: Interval | None
    verdict: Verdict
    why: str = ""

    @property
    def worse_by(self) -> float:
        """How many percent B is worse than A; negative if it is better."""
        ratio = self.b / self.a
        return 100.0 * ((1.0 - ratio) if self.higher_is_better else (ratio - 1.0))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `differences` lists how the loads differ; only `force` allows any."""

    rows: tuple[ComparisonRow, ...]
    failed_share: tuple[float, float]
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    def regressions(self, percent: float) -> list[str]:
        """Describe the metrics of B that are worse beyond noise by more than `percent`; more failed requests always
        count."""
        found = [
            f"{row.metric} is {row.worse_by:.1f} % worse"
            for row in self.rows
            if row.verdict == "slower" and row.worse_by > percent
        ]
        share_a, share_b = self.failed_share
        if share_b > share_a:
            found.append(f"{share_b:.1%} of B's requests failed, {share_a:.1%} of A's")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the content of `--output-json`."""
        return {
            "metrics": [
                dataclasses.asdict(row) | {"ratio": row.b / row.a, "worse_by_percent": row.worse_by}
                for row in self.rows
            ],
            "failed_share": {"a": self.failed_share[0], "b": self.failed_share[1]},
            "workload_differences": list(self.differences),
            "notes": list(self.notes),
        }


def compare(
    a: Sequence[RunFile],
    b: Sequence[RunFile],
    *,
    confidence: float = CONFIDENCE,
    min_difference: float | None = None,
    metrics: Collection[str] | None = None,
    force: bool = False,
) -> Comparison:
    """Compare B with A. `min_difference` is in percent; None selects the defaults above.

    Raises `ConfigError` when the two are different kinds of run or, without `force`, different loads.
    """
    runs = [*a, *b]
    kinds = {run.kind for run in runs}
    if len(kinds) > 1:
        raise ConfigError(f"{' and '.join(f'bench {kind}' for kind in sorted(kinds))} measure different things")
    differences = tuple(dict.fromkeys(text for run in runs[1:] for text in _differences(runs[0], run)))
    if differences and not force:
        raise ConfigError(f"the runs had different loads: {'; '.join(differences)}. --force compares them anyway")
    several = len(a) > 1 or len(b) > 1
    if min_difference is None:
        min_difference = MIN_DIFFERENCE if several else MIN_DIFFERENCE_ONE_RUN
    names = _common(runs, metrics)
    rows = tuple(_row(name, a, b, confidence, min_difference) for name in names)
    return Comparison(rows, (_failed_share(a), _failed_share(b)), differences, tuple(_notes(a, b, min_difference)))


def _row(
    name: str, a: Sequence[RunFile], b: Sequence[RunFile], confidence: float, min_difference: float
) -> ComparisonRow:
    higher = name in a[0].higher_is_better
    values_a, values_b = ([run.figures[name] for run in side] for side in (a, b))
    middle_a, middle_b = (math.exp(float(np.log(values).mean())) for values in (values_a, values_b))
    why = ""
    if len(a) > 1 or len(b) > 1:
        interval = intervals.ratio_of_runs(values_a, values_b, confidence)
    else:
        drawn_a, drawn_b = resample_metric(a[0], name, seed=1), resample_metric(b[0], name, seed=2)
        if isinstance(drawn_a, str) or isinstance(drawn_b, str):
            why = drawn_a if isinstance(drawn_a, str) else str(drawn_b)
            interval = None
        else:
            interval = intervals.ratio_of_draws(drawn_a, drawn_b, middle_b / middle_a, confidence)
    return ComparisonRow(name, higher, middle_a, middle_b, interval, verdict(interval, higher, min_difference), why)


def verdict(interval: Interval | None, higher_is_better: bool, min_difference: float) -> Verdict:
    """Judge B by the interval of B/A: a difference counts if the interval excludes 1 and it is large enough."""
    if interval is None:
        return "can't tell"
    beyond = interval.low > 1.0 or interval.high < 1.0
    if not beyond or abs(interval.ratio - 1.0) * 100.0 < min_difference:
        return "no difference beyond noise"
    return "faster" if (interval.ratio > 1.0) == higher_is_better else "slower"


def _common(runs: Sequence[RunFile], asked: Collection[str] | None) -> list[str]:
    names = [name for name in runs[0].figures if all(name in run.figures for run in runs)]
    names = [name for name in names if not (name.startswith("p50_") and name.replace("p50", "median") in names)]
    for name in asked or ():
        if name not in names:
            raise ConfigError(
                f"{name!r} is not in all of the files{nearest(name, names)}; they have {', '.join(names)}"
            )
    names = [name for name in names if asked is None or name in asked]
    if not names:
        raise ConfigError("the files have no figure in common that is above 0")
    return names


def _differences(a: RunFile, b: RunFile) -> list[str]:
    found = [
        f"{name} is {a.workload[name]} in {a.path} and {b.workload[name]} in {b.path}"
        for name in a.workload
        if name in b.workload and a.workload[name] != b.workload[name]
    ]
    return found + [
        f"{name}: {a.tokens[name]:.1f} in {a.path} and {b.tokens[name]:.1f} in {b.path}"
        for name in a.tokens
        if name in b.tokens and not math.isclose(a.tokens[name], b.tokens[name], rel_tol=_SAME_TOKENS)
    ]


def _failed_share(side: Sequence[RunFile]) -> float:
    failed = sum(run.failed for run in side)
    return failed / max(1, failed + sum(run.completed for run in side))


def _notes(a: Sequence[RunFile], b: Sequence[RunFile], min_difference: float) -> list[str]:
    notes = []
    if len(a) == len(b) == 1:
        notes.append(
            "One run a side: the bounds come from the spread within the run and miss differences from run to run, so a "
            f"difference below {min_difference:g} % gets no verdict; give several runs with --a and --b."
        )
    elif min(len(a), len(b)) == 1:
        notes.append("One side has a single run: it is assumed to vary from run to run as much as the other side.")
    models = {run.model for run in [*a, *b] if run.model}
    if len(models) > 1:
        notes.append(f"The models have different names: {', '.join(sorted(models))}.")
    notes += [f"{run.path} was interrupted: it holds only part of its load." for run in [*a, *b] if run.interrupted]
    for name, side in (("A", a), ("B", b)):
        failed = sum(run.failed for run in side)
        if failed:
            notes.append(f"{failed} requests of {name} failed ({_failed_share(side):.1%}); no figure counts them.")
    return notes
