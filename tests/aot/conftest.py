"""Runs without any device, and closes with a table of what was compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import pytest

from jaxserve.cli.common.table import span, table
from jaxserve.runtime.programs.inspection import KernelReport

HEADER = (
    "target", "model", "program", "seconds", "temp MiB", "alias MiB",
    "registers", "stack bytes", "shared KiB", "VMEM KiB",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the closing table; what its kernels take of a core is shown from the least to the most."""

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
            span(one.registers for one in self.kernels),
            span(one.stack_bytes for one in self.kernels),
            span((_kib(one.shared_bytes) for one in self.kernels), "{:.1f}"),
            span((_kib(one.vmem_bytes) for one in self.kernels), "{:.0f}"),
        )


def _kib(size: int | None) -> float | None:
    return None if size is None else size / 1024


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
    terminalreporter.write_line(table(HEADER, [row.cells() for row in rows], left=(0, 1, 2)))
