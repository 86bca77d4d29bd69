"""Searches settings for a load by measured runs: one setting after the other, racing the candidate values of each.

The default is measured several times first, which shows the noise. A candidate whose first run is no better is dropped;
the others are repeated as often as the default, and the best is kept only if it is better beyond noise. At the end
default and result are compared again on fresh servers, because the best of many candidates tends to look better than it
is. Everything stays within a time budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from jaxserve.bench.processes.measure import measure
from jaxserve.bench.processes.server_process import ServerProcess, serving
from jaxserve.bench.results.compare import verdict
from jaxserve.bench.results.intervals import Interval, ratio_of_runs
from jaxserve.bench.sweep import grid
from jaxserve.bench.sweep.grid import Options
from jaxserve.bench.sweep.run_sweep import BenchCommands, format_options
from jaxserve.bench.tune.candidates import TUNED_SETTINGS, ObservedLoad, choose_candidates, observe
from jaxserve.bench.tune.goal import Goal
from jaxserve.errors import BenchRunError

REPEATS = 3
CONFIDENCE = 0.95
# Percent; a smaller gain doesn't justify changing a setting.
MIN_GAIN = 1.0
_INFO_TIMEOUT = 30.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """One value of a setting: its scores, the outcome, and the server's observed load if all its runs were done."""

    change: Options
    scores: tuple[float, ...]
    kept: bool
    why: str
    observed: ObservedLoad | None = None


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """The result. `changes` override the base settings; `default` holds the scores of the base settings; `skipped`
    gives the reason for each setting that was not tried; `final_comparison` is None if the time was up before it."""

    changes: Options
    default: tuple[float, ...]
    trials: tuple[Trial, ...]
    skipped: Mapping[str, str]
    final_comparison: Interval | None
    seconds: float

    @property
    def noise(self) -> float:
        """Relative standard deviation of the default's runs."""
        return statistics.stdev(self.default) / statistics.fmean(self.default) if len(self.default) > 1 else 0.0


class TimeUpError(Exception):
    """The next measurement would not finish within the time budget."""


class Tuner:
    """Tries changes to the settings `base` under the load `flags` for `minutes`; files of all runs go into `folder`."""

    def __init__(
        self,
        base: Options,
        flags: Sequence[str],
        goal: Goal,
        *,
        minutes: float,
        folder: Path,
        seed: int = 0,
        notify: Callable[[str], None],
        commands: BenchCommands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base
        self._flags = flags
        self._goal = goal
        self._folder = folder
        self._seed = seed
        self._notify = notify
        self._commands = commands or BenchCommands()
        self._clock = clock
        self._started = clock()
        self._deadline = self._started + minutes * 60.0
        self._num_servers = 0
        self._start_seconds = 0.0
        self._run_seconds = 0.0
        self._result: dict[str, Any] = {}

    def tune(self) -> TuningResult:
        """Run the search. Raises `BenchRunError` if there is no time to measure the default."""
        try:
            default, observed = self._measure_default()
        except TimeUpError:
            raise BenchRunError(
                f"there was no time to measure the default settings {REPEATS} times; "
                "give more --minutes or a smaller load"
            ) from None
        changes: dict[str, Any] = {}
        best, trials, skipped = default, list[Trial](), dict[str, str]()
        for setting in TUNED_SETTINGS:
            found = choose_candidates(setting, observed, self._goal.name)
            if not found.values:
                skipped[setting] = found.why
                self._notify(f"{setting}: nothing to try, {found.why}")
                continue
            self._notify(f"{setting}: {found.why}")
            tried = self._race(changes, found.changes(), best)
            left = found.changes()[len(tried) :]
            if left:
                skipped[setting] = f"the time was up before {' and '.join(map(format_options, left))}"
                self._notify(f"{setting}: {skipped[setting]}")
            trials += tried
            for trial in tried:
                if trial.kept:
                    changes |= trial.change
                    best, observed = trial.scores, trial.observed or observed
        final = None
        if changes:
            try:
                final = self._compare_with_default(changes)
            except (TimeUpError, BenchRunError) as error:
                self._notify(f"no final comparison: {error or 'the time was up'}")
            if final is not None and verdict(final, True, MIN_GAIN) != "faster":
                changes = {}
        return TuningResult(changes, default, tuple(trials), skipped, final, self._clock() - self._started)

    def _measure_default(self) -> tuple[tuple[float, ...], ObservedLoad]:
        self._notify(f"default: {format_options(self._base)}")
        with self._server({}) as server:
            scores = tuple(self._run(server, turn) for turn in range(REPEATS))
            observed = self._observe(server)
        self._notify(f"default: {_format_scores(scores)} {self._goal.unit}")
        return scores, observed

    def _race(self, changes: Options, found: Sequence[Options], best: tuple[float, ...]) -> list[Trial]:
        """Try each candidate on top of `changes` against the best scores so far, until time is up; keep at most one."""
        trials = []
        for change in found:
            try:
                trials.append(self._try_candidate(dict(changes) | dict(change), change, best))
            except TimeUpError:
                break
            except BenchRunError as error:
                if not self._seconds_left():
                    break
                trials.append(Trial(change, (), False, f"failed: {error}"))
            self._notify(f"  {format_options(change)}: {trials[-1].why}")
        good = [trial for trial in trials if trial.kept]
        winner = max(good, key=lambda trial: statistics.fmean(trial.scores), default=None)
        return [
            dataclasses.replace(trial, kept=False, why=f"{trial.why}, but another value is better")
            if trial.kept and trial is not winner
            else trial
            for trial in trials
        ]

    def _try_candidate(self, settings: Options, change: Options, best: tuple[float, ...]) -> Trial:
        with self._server(settings) as server:
            scores = [self._run(server, 0)]
            if scores[0] > statistics.fmean(best):
                scores += [self._run(server, turn) for turn in range(1, REPEATS)]
            observed = self._observe(server)
        interval = ratio_of_runs(best, scores, CONFIDENCE)
        ratio = f"x{statistics.fmean(scores) / statistics.fmean(best):.3f}"
        if len(scores) < REPEATS:
            return Trial(change, tuple(scores), False, f"{ratio} in the first run, dropped")
        assert interval is not None
        kept = verdict(interval, True, MIN_GAIN) == "faster"
        ratio = format_interval(interval)
        return Trial(change, tuple(scores), kept, ratio if kept else f"{ratio}, not beyond noise", observed)

    def _compare_with_default(self, changes: Options) -> Interval:
        """Measure default and result again, each on a fresh server."""
        self._notify(f"final comparison: default against {format_options(changes)}")
        scores = []
        for settings in ({}, changes):
            with self._server(settings) as server:
                scores.append([self._run(server, turn) for turn in range(REPEATS)])
        interval = ratio_of_runs(scores[0], scores[1], CONFIDENCE)
        assert interval is not None
        self._notify(f"final comparison: {format_interval(interval)}")
        return interval

    def _server(self, changes: Options) -> contextlib.AbstractContextManager[ServerProcess]:
        self._require_time(self._start_seconds + self._run_seconds)
        self._num_servers += 1
        flags = grid.as_flags(dict(self._base) | dict(changes))
        log = self._folder / f"server-{self._num_servers:02d}.log"
        return serving(flags, log, timeout=self._seconds_left(), command=self._commands.serve)

    def _run(self, server: ServerProcess, turn: int) -> float:
        """Return the score of one run; each turn has its own seed, the same for every setting."""
        self._require_time(self._run_seconds)
        self._start_seconds = max(self._start_seconds, server.start_seconds)
        begun = self._clock()
        file = self._folder / f"server-{self._num_servers:02d}.run-{turn + 1}.json"
        flags = [*self._flags, "--seed", str(self._seed + turn)]
        self._result = measure(server, flags, file, timeout=self._seconds_left(), command=self._commands.bench_serve)
        self._run_seconds = max(self._run_seconds, self._clock() - begun)
        return self._goal.score(self._result)

    def _observe(self, server: ServerProcess) -> ObservedLoad:
        try:
            info = httpx.get(f"{server.url}/server_info", timeout=_INFO_TIMEOUT).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise BenchRunError(f"/server_info did not answer: {error or type(error).__name__}") from None
        return observe(info, self._result)

    def _seconds_left(self) -> float:
        return max(self._deadline - self._clock(), 0.0)

    def _require_time(self, seconds: float) -> None:
        if self._seconds_left() < max(seconds, 1.0):
            raise TimeUpError


def format_interval(interval: Interval) -> str:
    """Return a ratio with its bounds."""
    return f"x{interval.ratio:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _format_scores(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:.4g}" for score in scores)
