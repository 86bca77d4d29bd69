"""Takes proved cases from the table, and writes into it those that pass (`--proved`); `table.py` says which these are.

A program for a device that isn't here is lowered before it is compiled. If all programs of a case, their options and
the sources that check them are as when the case passed, it ends where it would compile the last one.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.proved.table import PATH, ROOT, Case, Table, digest, environment, installed

KINDS = ("interpreted", "aot")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--proved",
        choices=("write", "read", "ignore"),
        default="ignore",
        help=f"take cases that were proved for the same input from {PATH.relative_to(ROOT)}, and add to it those that "
        "pass now ('write') or not ('read'); by default, all are run",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--proved") != "ignore":
        config.pluginmanager.register(Proved(config), "proved-cases")


class Proved:
    """What one process of a test run knows: in xdist's workers, cases to leave out; in the other, what passed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._table = Table(environment(installed()))
        self._taken: dict[str, Case] = {}
        self._passed: defaultdict[tuple[str, str], dict[str, Case]] = defaultdict(dict)
        self._partial: set[str] = set()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note the files of which `-k` or `-m` leaves out provable cases."""
        self._partial |= {
            item.nodeid.partition("::")[0] for item in items if _is_provable(item) and item.nodeid not in self._taken
        }

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is proved. `trylast`: after `-m` and `-k` have chosen."""
        left = []
        for item in items:
            file, _, case = item.nodeid.partition("::")
            known = self._table.cases(file).get(case) if _is_provable(item) else None
            if known is None:
                left.append(item)
            else:
                self._taken[item.nodeid] = known
        if len(left) < len(items):
            self._config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._taken])
            items[:] = left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note a provable case for the table; end one whose programs are all as they were."""
        if not _is_provable(item):
            return (yield)
        file, _, case = item.nodeid.partition("::")
        made: list[str] = []
        item.user_properties += [("proves", made), ("sources", self._table.sources(file)[0])]
        with pytest.MonkeyPatch.context() as monkeypatch:
            if item.get_closest_marker("aot"):
                known = self._table.programs(file).get(case)
                _watch_compiles(monkeypatch, made, known["programs"] if known else None)
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the process that writes: remember what passed."""
        properties = dict(report.user_properties)
        if report.when != "call" or "proves" not in properties:
            return
        file, _, case = report.nodeid.partition("::")
        passed = self._passed[file, properties["sources"]]
        if report.passed:
            rows = [row for name, row in report.user_properties if name == "row"]
            passed[case] = {"programs": sorted(properties["proves"]), "rows": rows}
        elif report.skipped and _SAME in str(report.longrepr):
            passed[case] = self._taken[report.nodeid] = self._table.programs(file)[case]

    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended: what it left out, all of them left out."""
        self._taken |= node.workeroutput.get("taken", {})
        self._partial |= node.workeroutput.get("partial", set())

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write what passed, if nothing failed and files ran whole: an entry stands for all cases of its file."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput |= {"taken": self._taken, "partial": self._partial}
            return
        whole = not any("::" in argument for argument in self._config.args)
        if self._config.getoption("--proved") == "write" and self._passed and exitstatus == 0 and whole:
            for (file, tested), passed in self._passed.items():
                if file not in self._partial:
                    self._table.add(file, tested, passed)
            self._table.write()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        ran = {f"{file}::{case}" for (file, _), passed in self._passed.items() for case in passed}
        if self._taken or ran:
            terminalreporter.write_line(
                f"{len(self._taken)} cases were proved before for the same input, as {PATH.relative_to(ROOT)} says; "
                f"{len(ran - self._taken.keys())} of their kind passed now"
            )

    @property
    def rows(self) -> list[Any]:
        """The rows of the closing table that cases taken from the table had when they ran."""
        return [row for entry in self._taken.values() for row in entry["rows"]]


_SAME = "all programs of this case were proved before"


def _is_provable(item: pytest.Item) -> bool:
    """Whether the table may have it: large grids run only when somebody asks for them, and then really."""
    return any(item.get_closest_marker(kind) for kind in KINDS) and not item.get_closest_marker("grid")


def _watch_compiles(monkeypatch: pytest.MonkeyPatch, made: list[str], known: list[str] | None) -> None:
    import jax

    compile_it: Callable[..., Any] = jax.stages.Lowered.compile

    @functools.wraps(compile_it)
    def compile_or_end(lowered: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None) -> Any:
        options = {name: repr(one) for name, one in (compiler_options or {}).items() if name != "xla_dump_to"}
        made.append(digest([lowered.as_text(), options]))
        if sorted(made) == known:
            pytest.skip(_SAME)
        return compile_it(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_or_end)
