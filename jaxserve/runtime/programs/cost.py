"""Counts what a compiled program costs: launches, command buffers, waits of the host, bytes read and written.

Launches and bytes come from the program's text. How they are grouped comes from XLA's list of thunks, which it writes
only for a GPU and only on request: a command buffer is launched by the host as one; a loop or a condition outside of
one makes the host wait for the device.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.runtime.programs.hlo import HloModule, Instruction, Tables
from jaxserve.runtime.programs.kernel_names import kernel_name

# XLA's files of thunks, best first: it writes the first only if a command buffer was made.
THUNKS = ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")

# Instructions that launch nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "optimization-barrier", "after-all",
    "partition-id", "replica-id",
}  # fmt: skip
# Copies of a TPU beside its kernels.
_BESIDE = {"copy-start", "slice-start", "slice", "dynamic-slice"}
# Custom calls that only name memory.
_NAMES = ("ConcatBitcast", "AllocateBuffer")
# The second half of an operation that was counted when it started.
_DONE = ("-done", "-update")

_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)")
_COMMAND_BUFFER = "kCommandBuffer"
_HOST_WAITS = {"kConditional", "kWhile"}
_LIBRARIES = ("cublas", "cudnn")
# Parts of an operation's path that every layer or program has.
_COMMON = re.compile(r"^(jit\(.*\)|layer_\d+|cond|branch_\d+_fun|shard_map|pallas_call|closed_call)$")


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How the host launches a program: `top` launches, of which some are `command_buffers`, and `host_waits`."""

    top: int
    command_buffers: int
    host_waits: int


@dataclasses.dataclass(frozen=True)
class LaunchCost:
    """The bytes that `calls` launches of the same kind move in total; `flops` are those of matrix products."""

    kernel: str
    calls: int
    read_bytes: int
    written_bytes: int
    flops: float

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.read_bytes + self.written_bytes


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """The cost of one program on each device. `grouping` is None where XLA doesn't say.

    Counts neither keys and values that attention reads nor token counts, as these depend on the requests. All experts
    of a mixture count as read, and they compute all tokens that the program holds.
    """

    kinds: tuple[LaunchCost, ...]
    grouping: Grouping | None

    @property
    def launches(self) -> int:
        """The number of kernels, copies and collectives."""
        return sum(one.calls for one in self.kinds)

    @property
    def read_bytes(self) -> int:
        """Bytes read by all launches."""
        return sum(one.read_bytes for one in self.kinds)

    @property
    def written_bytes(self) -> int:
        """Bytes written by all launches."""
        return sum(one.written_bytes for one in self.kinds)

    @property
    def flops(self) -> float:
        """Floating-point operations of all matrix products."""
        return sum(one.flops for one in self.kinds)

    def costliest(self, count: int) -> list[LaunchCost]:
        """Return the kinds of launches that move most bytes."""
        return sorted(self.kinds, key=lambda one: one.nbytes, reverse=True)[:count]

    def as_json(self) -> dict[str, Any]:
        """Return totals and the ten costliest kinds of launches in JSON types."""
        return {
            "launches": self.launches,
            **(dataclasses.asdict(self.grouping) if self.grouping else {}),
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "flops": self.flops,
            "costliest": [dataclasses.asdict(one) for one in self.costliest(10)],
        }


def program_cost(module: HloModule, tables: Tables, thunks: Path | None) -> ProgramCost:
    """Return the cost of a program. `thunks` is a folder that XLA dumped it to, or None."""
    totals: dict[str, LaunchCost] = {}
    for one in _launched(module, module.entry.instructions.values()):
        moved, label = module.traffic(one, tables), launch_label(one)
        before = totals.get(label, LaunchCost(label, 0, 0, 0, 0.0))
        totals[label] = LaunchCost(
            label,
            before.calls + (one.opcode not in _BESIDE),
            before.read_bytes + moved.read_bytes,
            before.written_bytes + moved.written_bytes,
            before.flops + moved.flops,
        )
    files = [] if thunks is None else [file for pattern in THUNKS for file in thunks.glob(pattern)]
    found = files[0] if files else None
    return ProgramCost(tuple(totals.values()), None if found is None else grouping(found.read_text()))


def launch_label(one: Instruction) -> str:
    """Return a kernel's name or the path of the traced operation, without the layer: equal launches have one label."""
    name = kernel_name(one)
    if name is not None and not name.startswith(_LIBRARIES):
        return name
    parts = [part for part in one.op_name.split("/") if not _COMMON.match(part)]
    return "/".join(parts) or one.opcode


def grouping(thunks: str) -> Grouping:
    """Count the thunks of XLA's list, in which those inside another are indented."""
    outer: list[tuple[int, str]] = []
    top, kinds = 0, collections.Counter[str]()
    for line in thunks.split("\n"):
        if found := _THUNK.match(line):
            indent, kind = len(found["indent"]), found["kind"]
            while outer and outer[-1][0] >= indent:
                outer.pop()
            top += not outer
            if all(around != _COMMAND_BUFFER for _, around in outer):
                kinds[kind] += 1
            outer.append((indent, kind))
    return Grouping(top, kinds[_COMMAND_BUFFER], sum(kinds[kind] for kind in _HOST_WAITS))


def _launched(module: HloModule, found: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions that launch something; a loop counts as run once, and all branches as taken."""
    for one in found:
        inner = [module.computations[name] for name in one.bodies if name in module.computations]
        for computation in inner:
            yield from _launched(module, computation.instructions.values())
        free = one.opcode in _FREE or one.opcode.endswith(_DONE) or one.target in _NAMES
        if not inner and not free:
            yield one
