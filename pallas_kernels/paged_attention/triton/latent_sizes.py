"""Latent rows on Triton: which of them are supported, and the block sizes of their kernels.

A row of the pool is loaded once for all query heads of a tile, as keys and as values. The sums of a tile are 512
numbers a head, so that a program has registers for 32 heads. Products on Hopper's and Blackwell's faster paths begin at
64 rows: there, Hopper spills registers, and Blackwell lacks tensor memory. So products take Ampere's path everywhere.
"""

from __future__ import annotations

import itertools

from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.problem import Problem, is_float8
from pallas_kernels.target import KernelTarget

# Rows of the smallest tile of tensor cores, and of the largest whose sums fit into registers.
_FEWEST_ROWS, _MOST_ROWS = 16, 32

# The values that are summed in registers, and the other numbers of a key.
_VALUE_DIMS, _OTHER_DIMS = (16, 512), (8, 128)


def refusal(problem: Problem) -> str | None:
    """Return why latent rows of this size aren't supported, or None."""
    value_dim = problem.value_dim or 0
    other_dim = problem.head_dim - value_dim
    for what, size, (least, most) in (("values", value_dim, _VALUE_DIMS), ("other numbers", other_dim, _OTHER_DIMS)):
        if not least <= size <= most or size % 8:
            return f"triton takes latent rows with {what} of {least} to {most} in steps of 8, not of {size}"
    if problem.kv_heads != 1:
        return f"triton takes latent rows of one KV head a shard, not of {problem.kv_heads}"
    return None


def group_of(heads: int, most: int) -> int:
    """Return how many heads a tile has: the largest number up to `most` by which `heads` is divided evenly."""
    return next(group for group in range(min(heads, most), 0, -1) if heads % group == 0)


def decode_sizes(problem: Problem, target: KernelTarget, queries: int) -> dict[str, int]:
    """Return the largest tiles that compile without spilling registers.

    A tile has `block_rows` pairs of a head and one of up to `queries` queries of a sequence. If it has 32, registers
    hold the sums of one program a core, which therefore has two tiles of tokens in flight; two programs with 16.
    """
    capability, fp8 = target.capability or (9, 0), is_float8(problem.kv_dtype)
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, pl.next_power_of_2(problem.heads * queries)))
    large = capability[0] in (9, 10)
    if problem.dtype.itemsize == 4:
        rows, sizes = _FEWEST_ROWS, (16, 4, 3)
    elif rows == _FEWEST_ROWS:
        # The conversion of fp8 takes registers.
        sizes = ((32, 8, 5) if large else (16, 4, 3)) if fp8 else (32, 4, 5 if large else 3)
    else:
        # With more tokens than rows, warps share the tokens: none computes the logits of another one again.
        fits = not fp8 and (large or capability == (8, 0))
        sizes = (64 if fits else 32, 8, 5 if large else 3)
    return {"block_rows": rows, **dict(zip(("block_kv", "num_warps", "num_stages"), sizes, strict=True))}


def prefill_sizes(problem: Problem, target: KernelTarget) -> dict[str, int]:
    """Return the largest tiles that compile without spilling registers, of `block_q` pairs of a query and a head."""
    if problem.dtype.itemsize == 4:
        return {"block_q": _FEWEST_ROWS, "block_kv": 16, "num_warps": 4, "num_stages": 3}
    sizes = decode_sizes(problem, target, queries=_MOST_ROWS)
    return {"block_q": sizes.pop("block_rows"), **sizes}


def candidates(kind: str, problem: Problem) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table; those that don't compile on the device are skipped."""
    rows = "block_rows" if kind == "decode" else "block_q"
    names = (rows, "block_kv", "num_warps", "num_stages")
    sizes = itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (3, 5))
    return [dict(zip(names, one, strict=True)) for one in sizes]
