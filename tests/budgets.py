"""What tests may cost: a plugin that holds them to it, and that spreads them over the processes of a run.

A case that starts processes, interprets kernels or compiles many programs has a marker that says so, and a file of such
cases has a budget in `budgets.json`: the seconds that its cases of `make test` took together on two quiet cores.
`test_budgets.py` asks that every such file has one, and limits what they add up to. Time itself is never asserted,
as machines differ: the closing lines name files that took far more of a run than their part. More in CONTRIBUTING.md.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import multiprocessing.process
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

BUDGETS: dict[str, int] = json.loads(Path(__file__).with_name("budgets.json").read_text())
COSTS = {"process", "interpreted", "slow"}
LEFT_OUT = {"grid", "aot"}
"""Markers of what `make test` leaves out."""
PROGRAMS = 100
"""A case without a marker compiles fewer; the first one in a process compiles dozens of single operations."""

PARTS = 14

TOGETHER = "tests/e2e/default_model/"
"""A folder whose files share a server, and so run in one process."""
APART = {"tests/test_keystone.py", "tests/engine/test_keystone.py"}
"""Files that are too long for one process: each test of theirs may run in another one."""

costs: dict[str, set[str]] = {}
"""The files of this run and the markers of their cases, but for those that `make test` leaves out."""
_counts: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run only cases without a marker that says what they cost")
    parser.addoption("--part", help=f"run one of {PARTS} parts of the cases chosen: a number, or 'today'")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files by their budget, longest first, so that the last ones are short and no process runs on alone."""
    for item in items:
        marks = _marks(item)
        costs.setdefault(_file(item), set()).update(marks & COSTS if not marks & LEFT_OUT else set())
    if config.getoption("--quick"):
        items[:] = [item for item in items if not _marks(item) & (COSTS | LEFT_OUT)]
    seconds = Counter[str]()
    for file, budget in BUDGETS.items():
        seconds[_unit(file)] += budget
    items.sort(key=lambda item: (-seconds[_unit(_file(item))], _unit(_file(item))))
    if (asked := config.getoption("--part")) is not None:
        part = (datetime.date.today().toordinal() if asked == "today" else int(asked)) % PARTS
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % PARTS == part]


class ByFile(LoadScopeScheduling):
    """Gives a process of pytest-xdist a whole file at a time, but for those `TOGETHER` and `APART`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid.partition("[")[0] if file in APART else _unit(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Count from now on: modules of tests may compile something when they are imported.

    What there is now stays: the garbage collector needn't look at it again.
    """
    if not _counts:
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        _counts["ready"] = 1
        _count_processes()
        _count_compiles()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEFORE] = _counts.copy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a case that costs what its markers don't say."""
    result = yield
    spent, marks = _counts - item.stash[_BEFORE], _marks(item)
    where = "see 'What a test may cost' in CONTRIBUTING.md"
    if spent["processes"] and "process" not in marks:
        pytest.fail(f"{spent['processes']} processes were started: give this case the marker `process`; {where}")
    if spent["interpreted"] and not marks & {"interpreted", "aot"}:
        pytest.fail(f"{spent['interpreted']} kernels were interpreted: use the marker `interpreted`; {where}")
    if spent["programs"] > PROGRAMS and not marks & COSTS:
        pytest.fail(f"{spent['programs']} programs were compiled: compile fewer, or use the marker `slow`; {where}")
    return result


_BEFORE = pytest.StashKey[Counter[str]]()


def _count_processes() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and _is_costly(arguments[1]):
            _counts["processes"] += 1

    sys.addaudithook(audit)
    start = multiprocessing.process.BaseProcess.start
    multiprocessing.process.BaseProcess.start = _counting(start, "processes")  # type: ignore[method-assign]


def _is_costly(command: Any) -> bool:
    """Whether a command is a server, an engine, or a test's own process; others are gone in a fraction of a second."""
    words = [command] if isinstance(command, str | bytes) else [str(word) for word in command]
    return any(
        word == "serve" or str(word).startswith(("jaxserve.worker", "jaxserve.engine.", "tests.")) for word in words
    )


def _count_compiles() -> None:
    import jax
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    def note(event: str, _: float, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _counts["programs"] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    if jax.default_backend() == "cpu":
        pallas.pallas_call = _counting(pallas.pallas_call, "interpreted")
        mosaic_gpu.kernel = _counting(mosaic_gpu.kernel, "interpreted")


def _counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*arguments: Any, **options: Any) -> Any:
        _counts[name] += 1
        return function(*arguments, **options)

    return counting


class Seconds:
    """What files took, in the process that prints."""

    def __init__(self) -> None:
        self.by_file: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_file[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name files that took more than twice what the others did of their budgets, and ten seconds more."""
        known = {file: seconds for file, seconds in self.by_file.items() if file in BUDGETS}
        if not known:
            return
        factor = sum(known.values()) / sum(BUDGETS[file] for file in known)
        for file, seconds in sorted(self.by_file.items(), key=lambda one: -one[1]):
            part = factor * BUDGETS.get(file, 2.0)
            if seconds > 2 * part + 10:
                terminalreporter.write_line(
                    f"{file} took {seconds:.0f} s; by its budget in tests/budgets.json, {part:.0f} s of this run"
                )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds(), "seconds")


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def _unit(file: str) -> str:
    """Return what a file is run together with."""
    return TOGETHER if file.startswith(TOGETHER) else file


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
