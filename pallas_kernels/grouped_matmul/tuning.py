"""Chooses block sizes: the caller's, else the measured ones of the device. If there are none, a backend has a rule.

Owns `tuned/`: one table a device.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pallas_kernels.quantized_matmul import Scheme
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind, tuned_sizes

TABLES = Path(__file__).parent / "tuned"

# With more rows for each expert, tiles of rows become larger than the smallest one.
DECODE_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Experts:
    """The weights of a layer's experts `[count, out_dim, in_dim]`; if `gated`, outputs are those of gate and up."""

    count: int
    out_dim: int
    in_dim: int
    gated: bool
    scheme: Scheme | None

    def facts(self) -> dict[str, Any]:
        """Return the facts by which a table finds a product, besides the kind of work."""
        scheme = {"numbers": None} if self.scheme is None else dataclasses.asdict(self.scheme)
        return {"experts": self.count, "out_dim": self.out_dim, "in_dim": self.in_dim, "gated": self.gated, **scheme}

    def kind(self, rows: int) -> Kind:
        """Return the kind of sizes that a product takes, by its rows."""
        return "decode" if rows <= DECODE_ROWS * self.count else "prefill"


def tuned_blocks(target: KernelTarget, backend: str, rows: int, experts: Experts) -> dict[str, int] | None:
    """Return block sizes by name, or None if the caller asks for none and none were measured."""
    return tuned_sizes(TABLES, target, backend, experts.kind(rows), experts.facts())
