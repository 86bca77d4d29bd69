"""Work lists of persistent kernels: the items that there are, and which program computes each.

A kernel has as many programs as the GPU runs at once, and each computes items until none is left. So there are no
programs without work, and a call with nothing to do ends as soon as its programs have read one number. A list names the
parts of rows (splits of a decode, tiles of a prefill); an item is one KV head of a part. All layers have the same list,
so XLA computes it once a step.

To balance the work, parts of long rows come first, and items go to programs 0 to n - 1, then to n - 1 to 0, and so on.
The work of two programs then differs by less than the longest item, and the last items are short. A counter of taken
items would balance differences in speed as well, but each item would wait for it. Decode needs no more: fewer than half
of its programs saturate memory, so the last programs run faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

# The interpreter runs programs one after another: there are so few that each computes several items.
_INTERPRETED_PROGRAMS = 6


class WorkList(NamedTuple):
    """The number of parts, and for each its row and its number in the row; `size` is the most that there can be."""

    total: Int[Array, " 1"]
    rows: Int[Array, " size"]
    parts: Int[Array, " size"]


def work_list(parts: Int[Array, " rows"], lengths: Int[Array, " rows"], size: int) -> WorkList:
    """List `parts[row]` parts of each row, rows of great `lengths` first. Comparing all pairs is less than sorting."""
    row, at = jnp.arange(parts.shape[0], dtype=jnp.int32), jnp.arange(size, dtype=jnp.int32)[:, None]
    mine = lengths[:, None]
    before = (lengths > mine) | ((lengths == mine) & (row < row[:, None]))
    starts = jnp.sum(jnp.where(before, parts, 0), axis=1)
    owned = (starts <= at) & (at < starts + parts)
    rows, firsts = (jnp.sum(jnp.where(owned, x, 0), axis=1) for x in (row, starts))
    return WorkList(jnp.sum(parts, keepdims=True), rows, at[:, 0] - firsts)


def num_programs(work: WorkList, kv_heads: int, at_once: int, *, interpret: bool) -> int:
    """Return the number of programs of a kernel of which the GPU runs `at_once` at once."""
    return min(work.rows.shape[0] * kv_heads, _INTERPRETED_PROGRAMS if interpret else at_once)


def for_each_item(work: Any, kv_heads: int, programs: int, compute: Callable[[Array, Array, Array], None]) -> None:
    """Call `compute(row, part, kv_head)` for this program's items. `work` is a `WorkList` of references."""
    program = pl.program_id(0)
    items = work.total[0] * kv_heads

    def one_round(i: Array, _: None) -> None:
        item = i * programs + jnp.where(i & 1 == 0, program, programs - 1 - program)

        @pl.when(item < items)
        def run() -> None:
            index = lax.div(item, kv_heads)
            compute(work.rows[index], work.parts[index], lax.rem(item, kv_heads))

    lax.fori_loop(0, pl.cdiv(items, programs), one_round, None)
