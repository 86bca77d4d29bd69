"""Runs without any device, and ends with a table of the compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest

from jaxserve.cli.common.table import format_range, format_table
from jaxserve.runtime.programs.inspection import KernelReport
from tests.proved.table import digest

HEADER = (
    "target", "model", "program", "seconds", "temp MiB", "alias MiB",
    "registers", "stack bytes", "shared KiB", "VMEM KiB",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the final table; shows the smallest and the largest resources of its kernels."""

    target: str
    model: str
    program: str
    seconds: float
    temp_bytes: int
    alias_bytes: int
    kernels: Sequence[KernelReport] = ()

    def cells(self) -> tuple[str, ...]:
        return (
            self.target,
            self.model,
            self.program,
            f"{self.seconds:.1f}",
            f"{self.temp_bytes / 2**20:.1f}",
            f"{self.alias_bytes / 2**20:.0f}",
            format_range(one.registers for one in self.kernels),
            format_range(one.stack_bytes for one in self.kernels),
            format_range((_kib(one.shared_bytes) for one in self.kernels), "{:.1f}"),
            format_range((_kib(one.vmem_bytes) for one in self.kernels), "{:.0f}"),
        )


def _kib(size: int | None) -> float | None:
    return None if size is None else size / 1024


@pytest.fixture(scope="session", autouse=True)
def _settings() -> None:
    """Use no accelerator even if there is one; and let a kernel's text be the same in any folder."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/(?=pallas_kernels/)")


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """A function that adds a row to the table printed at the end; it works in pytest-xdist's workers too."""
    return lambda row: request.node.user_properties.append(("row", row.cells()))


@pytest.fixture
def compared_with(request: pytest.FixtureRequest) -> Callable[[Any], None]:
    """A function that takes what a case compares its programs with, if that isn't in its sources: call it before."""
    return lambda value: dict(request.node.user_properties).get("proves", []).append(digest(repr(value)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests = [one for outcome in ("passed", "failed") for one in terminalreporter.stats.get(outcome, [])]
    rows = [cells for test in tests for name, cells in test.user_properties if name == "row"]
    if proved := terminalreporter.config.pluginmanager.get_plugin("proved-cases"):
        rows += proved.rows
    if rows:
        terminalreporter.section("programs compiled for devices that are not here")
        terminalreporter.write_line(format_table(HEADER, rows, left=(0, 1, 2)))
