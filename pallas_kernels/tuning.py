"""Tables of block sizes that were measured on a device: where they lie, and how an entry is found.

A table is one JSON file a device, written by a program that times block sizes and never by hand. It is a list of
entries, each of a backend, a kind of work, the facts of the problem that was measured, and the block sizes.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Literal

from pallas_kernels.target import KernelTarget

Kind = Literal["decode", "prefill"]


def tuned_sizes(
    tables: Path, target: KernelTarget, backend: str, kind: Kind, facts: dict[str, Any]
) -> dict[str, int] | None:
    """Return block sizes by name: those that the caller asks for, else those that were measured, else None."""
    if requested := {name: size for of, name, size in target.blocks if of == kind}:
        return requested
    return _table(tables / f"{device_name(target)}.json").get(_key(backend, kind, facts))


def device_name(target: KernelTarget) -> str:
    """Return the device's name as in file names: `nvidia-h200` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9]+", "-", target.kind.lower()).strip("-") or target.platform


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a table, or none if the file doesn't exist."""
    return json.loads(path.read_text()) if path.exists() else []


def write_entries(path: Path, entries: list[dict[str, Any]]) -> None:
    """Write a table, one entry a line."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n")


@functools.cache
def _table(path: Path) -> dict[tuple[Any, ...], dict[str, int]]:
    return {_key(e["backend"], e["kind"], e["problem"]): e["blocks"] for e in read_entries(path)}


def _key(backend: str, kind: str, problem: dict[str, Any]) -> tuple[Any, ...]:
    return (backend, kind, *sorted(problem.items()))
