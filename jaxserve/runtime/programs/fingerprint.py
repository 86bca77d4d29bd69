"""The facts about this machine and this source tree that a compiled program depends on.

`ProgramBuilder.facts` adds those of the deployment; a hash of all of them names the folder that programs are cached in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import msgspec

import jaxserve
import pallas_kernels
from jaxserve import host
from jaxserve.config.threads import xla_threads
from jaxserve.models.layout import LaidOutModel
from pallas_kernels.cpu import cpu_features, cpu_name, refusal


def cpu_flags() -> str:
    """Return the CPU's name and features as text. XLA may use any feature: a CPU without it can't run the program."""
    if info := host.cpu_info():
        return info
    if refusal() is not None:
        return platform.processor()
    return f"model name: {cpu_name()}\nflags: {' '.join(sorted(cpu_features()))}"


def cpu_fact() -> str:
    """Return the CPU's name, a hash of its features, and how many threads XLA's programs use on it."""
    flags = cpu_flags()
    name = next((line.partition(":")[2].strip() for line in flags.splitlines() if line.startswith("model name")), "")
    digest = hashlib.sha256(flags.encode()).hexdigest()[:12]
    return f"{name} {digest}".strip() + f", {xla_threads(os.environ)} threads"


def as_json(value: Any) -> Any:
    """Return a frozen struct or dataclass as JSON types; a value that JSON has no type for becomes its `repr`.

    The fields of a model's config stand beside those of its layout.
    """
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value) if field.compare)
        found = {name: as_json(getattr(value, name)) for name in fields}
        return found | (found.pop("config") if isinstance(value, LaidOutModel) else {})
    if isinstance(value, msgspec.Struct):
        return {name: as_json(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def source_hash() -> str:
    """Return a hash of our own sources that shape a program, and of the tables that tune its kernels."""
    ours, kernels = (Path(str(package.__file__)).parent for package in (jaxserve, pallas_kernels))
    paths = [ours / name for name in ("api_types.py", "params.py", "step_plan.py")]
    for room in (ours / "layers", ours / "models", ours / "runtime", kernels):
        paths += sorted(path for path in room.rglob("*") if path.suffix in (".py", ".json"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
