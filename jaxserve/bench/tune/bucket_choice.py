"""Chooses the sizes of decode programs (`--cuda-graph-bs`) for an observed load: padding against number of programs.

A step runs in the smallest program that holds its rows, and costs as much as a full one. This module only calculates
with the frequency of each number of rows.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

# An additional program must save this share of all computed rows to pay for its compilation and memory.
MIN_SAVING = 0.01


@dataclasses.dataclass(frozen=True)
class BucketChoice:
    """Ascending program sizes, the last of which holds the largest batch, and the share of rows that is padding (0 to
    1). `padding_with_one_fewer` is that share with one program less, None if there is only one."""

    buckets: tuple[int, ...]
    padding: float
    padding_with_one_fewer: float | None


def choose_buckets(
    steps_by_rows: Mapping[int, int], largest: int, *, max_programs: int = 16, min_saving: float = MIN_SAVING
) -> BucketChoice:
    """Return the best set of sizes: programs are added while each saves `min_saving` of the computed rows.

    `steps_by_rows` maps a number of rows (1 to `largest`) to its number of steps. No set of as many sizes pads less.
    """
    chosen = best_buckets(steps_by_rows, largest, 1)
    share, before = padding_share(steps_by_rows, chosen), None
    for count in range(2, max_programs + 1):
        buckets = best_buckets(steps_by_rows, largest, count)
        padding = padding_share(steps_by_rows, buckets)
        if share - padding < min_saving:
            break
        chosen, share, before = buckets, padding, share
    return BucketChoice(chosen, share, before)


def best_buckets(steps_by_rows: Mapping[int, int], largest: int, count: int) -> tuple[int, ...]:
    """Return at most `count` sizes, including `largest`, with the least padding: dynamic programming over the observed
    numbers of rows, because a size between two of them only pads more."""
    sizes = sorted({size for size, steps in steps_by_rows.items() if steps > 0} | {largest})
    assert sizes[0] >= 1, sizes
    assert sizes[-1] == largest, f"{sizes[-1]} rows are more than {largest}"
    steps, rows = [0], [0]
    for size in sizes:
        steps.append(steps[-1] + steps_by_rows.get(size, 0))
        rows.append(rows[-1] + size * steps_by_rows.get(size, 0))

    def wasted(first: int, last: int) -> int:
        """Return the padded rows of sizes `first` to `last` (indices) in a program of size `last`."""
        return sizes[last] * (steps[last + 1] - steps[first]) - (rows[last + 1] - rows[first])

    costs = [wasted(0, last) for last in range(len(sizes))]
    choices: list[list[int]] = []
    for _ in range(min(count, len(sizes)) - 1):
        # Sizes up to index `first` use the earlier programs; -1 means that there is no earlier program.
        options = [
            min([(costs[first] + wasted(first + 1, last), first) for first in range(last)] + [(wasted(0, last), -1)])
            for last in range(len(sizes))
        ]
        costs = [cost for cost, _ in options]
        choices.append([first for _, first in options])
    found, last = [largest], len(sizes) - 1
    for before in reversed(choices):
        last = before[last]
        if last < 0:
            break
        found.append(sizes[last])
    return tuple(sorted(found))


def padding_share(steps_by_rows: Mapping[int, int], buckets: Sequence[int]) -> float:
    """Return the share of computed rows that is padding, 0 to 1."""
    used = sum(size * steps for size, steps in steps_by_rows.items())
    computed = sum(buckets[bisect.bisect_left(buckets, size)] * steps for size, steps in steps_by_rows.items())
    return (computed - used) / computed if computed else 0.0
