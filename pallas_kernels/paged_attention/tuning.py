"""Block sizes: what the caller asks for, else what was measured on the device, else nothing (a backend has its rule).

Owns `tuned/`: one JSON file a device, written by `python -m pallas_kernels.tune` and never by hand. A file is a list
of entries, each a backend, a kind of work, the facts of the problem that the sizes were measured for, and the sizes.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, Literal

from pallas_kernels.paged_attention.problem import Problem, Target

Kind = Literal["decode", "prefill"]

TABLES = Path(__file__).parent / "tuned"


def tuned_blocks(target: Target, backend: str, kind: Kind, problem: Problem) -> dict[str, int] | None:
    """Block sizes by name, or None where nobody asked for any and none were measured."""
    if asked := {name: size for of, name, size in target.blocks if of == kind}:
        return asked
    return _table(TABLES / f"{device_name(target)}.json").get(_key(backend, kind, facts(problem)))


def facts(problem: Problem) -> dict[str, Any]:
    """What block sizes depend on: of the heads only how many share a KV head."""
    return {
        "group": problem.heads // problem.kv_heads,
        "head_dim": problem.head_dim,
        "page_size": problem.page_size,
        "dtype": str(problem.dtype),
        "kv_dtype": str(problem.kv_dtype),
    }


def device_name(target: Target) -> str:
    """As files are called: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", target.kind.lower()).strip("-") or target.platform


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a table; none where it isn't there."""
    return json.loads(path.read_text()) if path.exists() else []


def write_entries(path: Path, entries: list[dict[str, Any]]) -> None:
    """Writes a table, one entry a line."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n")


@functools.cache
def _table(path: Path) -> dict[tuple[Any, ...], dict[str, int]]:
    return {_key(e["backend"], e["kind"], e["problem"]): e["blocks"] for e in read_entries(path)}


def _key(backend: str, kind: str, problem: dict[str, Any]) -> tuple[Any, ...]:
    return (backend, kind, *sorted(problem.items()))
