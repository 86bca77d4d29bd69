"""Chooses block sizes: the caller's, else the measured ones of the device. If there are none, a backend has a rule.

Owns `tuned/`: one table a device.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind, tuned_sizes

TABLES = Path(__file__).parent / "tuned"

# A step of more rows is bound by the tensor cores rather than by reading the weight.
DECODE_ROWS = 64


def tuned_blocks(
    target: KernelTarget, backend: str, rows: int, out_dim: int, in_dim: int, scheme: Scheme
) -> dict[str, int] | None:
    """Return block sizes by name, or None if the caller asks for none and none were measured."""
    return tuned_sizes(TABLES, target, backend, kind_of(rows), facts(out_dim, in_dim, scheme))


def facts(out_dim: int, in_dim: int, scheme: Scheme) -> dict[str, Any]:
    """Return the facts by which a table finds a product, besides the kind of work."""
    return {"out_dim": out_dim, "in_dim": in_dim, **dataclasses.asdict(scheme)}


def kind_of(rows: int) -> Kind:
    """Return the kind of sizes that a product of `rows` rows takes."""
    return "decode" if rows <= DECODE_ROWS else "prefill"
