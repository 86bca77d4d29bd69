"""Chooses block sizes: the caller's, else the measured ones of the device. If there are none, a backend has a rule.

Owns `tuned/`: one table a device, written by `python -m pallas_kernels.tune`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind, tuned_sizes

TABLES = Path(__file__).parent / "tuned"


def tuned_blocks(target: KernelTarget, backend: str, kind: Kind, problem: Problem) -> dict[str, int] | None:
    """Return block sizes by name, or None if the caller asks for none and none were measured."""
    return tuned_sizes(TABLES, target, backend, kind, facts(problem))


def facts(problem: Problem) -> dict[str, Any]:
    """Return the facts that block sizes depend on: of the numbers of heads, only how many share a KV head."""
    of_latent_rows = {} if problem.value_dim is None else {"value_dim": problem.value_dim}
    return {
        "group": problem.heads // problem.kv_heads,
        "head_dim": problem.head_dim,
        "page_size": problem.page_size,
        "dtype": str(problem.dtype),
        "kv_dtype": str(problem.kv_dtype),
        **of_latent_rows,
    }
