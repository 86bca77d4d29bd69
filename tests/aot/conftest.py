"""Runs without any device, and closes with a table of what was compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import pytest


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the closing table."""

    target: str
    model: str
    program: str
    seconds: float
    temp_bytes: int
    alias_bytes: int


ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session", autouse=True)
def _cpu_only() -> None:
    """An accelerator that happens to be here is left alone."""
    jax.config.update("jax_platforms", "cpu")


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[Row], None]:
    return pytestconfig.stash.setdefault(ROWS, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("programs compiled for devices that are not here")
    line = "{:<12} {:<32} {:<18} {:>8} {:>9} {:>10}".format
    terminalreporter.write_line(line("target", "model", "program", "seconds", "temp MiB", "alias MiB"))
    for row in rows:
        sizes = f"{row.temp_bytes / 2**20:.1f}", f"{row.alias_bytes / 2**20:.0f}"
        terminalreporter.write_line(line(row.target, row.model, row.program, f"{row.seconds:.1f}", *sizes))
