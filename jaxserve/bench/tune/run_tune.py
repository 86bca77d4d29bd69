"""Finds settings for a load by measured runs: coordinate by coordinate, racing the candidates of each.

The default is repeated first, which shows the noise. A candidate whose first run is no better is dropped; the others
are repeated as often as the default, and the best is kept only when it is beyond noise. At the end default and result
meet once more on fresh servers, as the best of many tends to look better than it is. All within a time budget.
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
from jaxserve.bench.processes.server_process import Server, serving
from jaxserve.bench.results.compare import verdict
from jaxserve.bench.results.intervals import Interval, ratio_of_runs
from jaxserve.bench.sweep import grid
from jaxserve.bench.sweep.grid import Options
from jaxserve.bench.sweep.run_sweep import Commands, described
from jaxserve.bench.tune.candidates import KNOBS, Observed, candidates, observe
from jaxserve.bench.tune.goal import Goal
from jaxserve.errors import BenchRunError

REPEATS = 3
CONFIDENCE = 0.95
# Percent; less isn't worth a setting of its own.
MIN_GAIN = 1.0
_INFO_TIMEOUT = 30.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting tried: its scores, what came of it, and what was seen where it ran as often as the default."""

    change: Options
    scores: tuple[float, ...]
    kept: bool
    why: str
    seen: Observed | None = None


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result. `changes` go over the base settings; `default` are the scores of those; `skipped` says by setting why
    nothing was tried; `check` is the last comparison, None where time was up before it."""

    changes: Options
    default: tuple[float, ...]
    trials: tuple[Trial, ...]
    skipped: Mapping[str, str]
    check: Interval | None
    seconds: float

    @property
    def noise(self) -> float:
        """Relative standard deviation of the default's runs."""
        return statistics.stdev(self.default) / statistics.fmean(self.default) if len(self.default) > 1 else 0.0


class TimeUpError(Exception):
    """What comes next would not end within the budget."""


class Tuner:
    """Tries settings of `base` under the load `flags` for `minutes`; every run's files go into `folder`."""

    def __init__(
        self,
        base: Options,
        flags: Sequence[str],
        goal: Goal,
        *,
        minutes: float,
        folder: Path,
        seed: int = 0,
        say: Callable[[str], None],
        commands: Commands | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base
        self._flags = flags
        self._goal = goal
        self._folder = folder
        self._seed = seed
        self._say = say
        self._commands = commands or Commands()
        self._clock = clock
        self._started = clock()
        self._deadline = self._started + minutes * 60.0
        self._num_servers = 0
        self._start_seconds = 0.0
        self._run_seconds = 0.0
        self._result: dict[str, Any] = {}

    def tune(self) -> Tuned:
        """Search. Raises `BenchRunError` when the default itself can't be measured in the time."""
        try:
            default, seen = self._default()
        except TimeUpError:
            raise BenchRunError(
                f"the default settings could not be measured {REPEATS} times in the time there was; give more "
                "--minutes or a smaller load"
            ) from None
        changes: dict[str, Any] = {}
        best, trials, skipped = default, list[Trial](), dict[str, str]()
        for knob in KNOBS:
            found = candidates(knob, seen, self._goal.name)
            if not found.values:
                skipped[knob] = found.why
                self._say(f"{knob}: nothing to try, {found.why}")
                continue
            self._say(f"{knob}: {found.why}")
            tried = self._race(changes, found.settings(), best)
            left = found.settings()[len(tried) :]
            if left:
                skipped[knob] = f"the time was up before {' and '.join(map(described, left))}"
                self._say(f"{knob}: {skipped[knob]}")
            trials += tried
            for trial in tried:
                if trial.kept:
                    changes |= trial.change
                    best, seen = trial.scores, trial.seen or seen
        check = None
        if changes:
            try:
                check = self._check(changes)
            except (TimeUpError, BenchRunError) as error:
                self._say(f"no last comparison: {error or 'the time was up'}")
            if check is not None and verdict(check, True, MIN_GAIN) != "faster":
                changes = {}
        return Tuned(changes, default, tuple(trials), skipped, check, self._clock() - self._started)

    def _default(self) -> tuple[tuple[float, ...], Observed]:
        self._say(f"default: {described(self._base)}")
        with self._server({}) as server:
            scores = tuple(self._run(server, turn) for turn in range(REPEATS))
            seen = self._observe(server)
        self._say(f"default: {_shown(scores)} {self._goal.unit}")
        return scores, seen

    def _race(self, changes: Options, found: Sequence[Options], best: tuple[float, ...]) -> list[Trial]:
        """Try each on top of `changes` against the scores of what is best so far, as long as there is time; at most one
        is kept."""
        trials = []
        for change in found:
            try:
                trials.append(self._try(dict(changes) | dict(change), change, best))
            except TimeUpError:
                break
            except BenchRunError as error:
                if not self._left():
                    break
                trials.append(Trial(change, (), False, f"failed: {error}"))
            self._say(f"  {described(change)}: {trials[-1].why}")
        good = [trial for trial in trials if trial.kept]
        winner = max(good, key=lambda trial: statistics.fmean(trial.scores), default=None)
        return [
            dataclasses.replace(trial, kept=False, why=f"{trial.why}, but another value is better")
            if trial.kept and trial is not winner
            else trial
            for trial in trials
        ]

    def _try(self, settings: Options, change: Options, best: tuple[float, ...]) -> Trial:
        with self._server(settings) as server:
            scores = [self._run(server, 0)]
            if scores[0] > statistics.fmean(best):
                scores += [self._run(server, turn) for turn in range(1, REPEATS)]
            seen = self._observe(server)
        interval = ratio_of_runs(best, scores, CONFIDENCE)
        ratio = f"x{statistics.fmean(scores) / statistics.fmean(best):.3f}"
        if len(scores) < REPEATS:
            return Trial(change, tuple(scores), False, f"{ratio} in the first run, dropped")
        assert interval is not None
        kept = verdict(interval, True, MIN_GAIN) == "faster"
        ratio = ratio_text(interval)
        return Trial(change, tuple(scores), kept, ratio if kept else f"{ratio}, not beyond noise", seen)

    def _check(self, changes: Options) -> Interval | None:
        """Default and result once more, each on a fresh server."""
        self._say(f"last comparison: default against {described(changes)}")
        scores = []
        for settings in ({}, changes):
            with self._server(settings) as server:
                scores.append([self._run(server, turn) for turn in range(REPEATS)])
        check = ratio_of_runs(scores[0], scores[1], CONFIDENCE)
        assert check is not None
        self._say(f"last comparison: {ratio_text(check)}")
        return check

    def _server(self, changes: Options) -> contextlib.AbstractContextManager[Server]:
        self._need(self._start_seconds + self._run_seconds)
        self._num_servers += 1
        flags = grid.as_flags(dict(self._base) | dict(changes))
        log = self._folder / f"server-{self._num_servers:02d}.log"
        return serving(flags, log, timeout=self._left(), command=self._commands.serve)

    def _run(self, server: Server, turn: int) -> float:
        """The score of one run; each turn has a seed of its own, the same for every setting."""
        self._need(self._run_seconds)
        self._start_seconds = max(self._start_seconds, server.start_seconds)
        begun = self._clock()
        file = self._folder / f"server-{self._num_servers:02d}.run-{turn + 1}.json"
        flags = [*self._flags, "--seed", str(self._seed + turn)]
        self._result = measure(server, flags, file, timeout=self._left(), command=self._commands.bench_serve)
        self._run_seconds = max(self._run_seconds, self._clock() - begun)
        return self._goal.score(self._result)

    def _observe(self, server: Server) -> Observed:
        try:
            info = httpx.get(f"{server.url}/server_info", timeout=_INFO_TIMEOUT).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise BenchRunError(f"/server_info gives no answer: {error or type(error).__name__}") from None
        return observe(info, self._result)

    def _left(self) -> float:
        return max(self._deadline - self._clock(), 0.0)

    def _need(self, seconds: float) -> None:
        if self._left() < max(seconds, 1.0):
            raise TimeUpError


def ratio_text(interval: Interval) -> str:
    """A ratio with its bounds."""
    return f"x{interval.ratio:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _shown(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:.4g}" for score in scores)
