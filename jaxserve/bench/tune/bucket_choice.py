"""Which sizes of decode programs suit an observed load: padding wasted against programs compiled.

A step runs in the smallest program that holds its rows and pays for all of it. Pure arithmetic on how often each number
of rows was seen; the sizes are `--cuda-graph-bs`.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

# Another program must save this share of all rows computed; each costs its compilation and memory.
WORTH = 0.01


@dataclasses.dataclass(frozen=True)
class BucketChoice:
    """Ascending sizes, the last of which holds the largest batch there may be, and the share of rows that is padding
    (0 to 1). `one_fewer` is that share with one program less, None when there is only one."""

    buckets: tuple[int, ...]
    padding: float
    one_fewer: float | None


def choose_buckets(
    steps_by_rows: Mapping[int, int], largest: int, *, max_programs: int = 16, worth: float = WORTH
) -> BucketChoice:
    """The best set of sizes, as large as pays: programs are added while each saves `worth` of the rows computed.

    `steps_by_rows` says how many steps had so many rows (1 to `largest`). No other set of as many sizes wastes less.
    """
    chosen = best_buckets(steps_by_rows, largest, 1)
    share, before = padding_share(steps_by_rows, chosen), None
    for count in range(2, max_programs + 1):
        buckets = best_buckets(steps_by_rows, largest, count)
        padding = padding_share(steps_by_rows, buckets)
        if share - padding < worth:
            break
        chosen, share, before = buckets, padding, share
    return BucketChoice(chosen, share, before)


def best_buckets(steps_by_rows: Mapping[int, int], largest: int, count: int) -> tuple[int, ...]:
    """At most `count` sizes, `largest` among them, that waste the fewest rows: dynamic programming over the sizes that
    were seen, as a size between two of them only pads more."""
    sizes = sorted({size for size, steps in steps_by_rows.items() if steps > 0} | {largest})
    assert sizes[0] >= 1, sizes
    assert sizes[-1] == largest, f"{sizes[-1]} rows are more than {largest}"
    steps, rows = [0], [0]
    for size in sizes:
        steps.append(steps[-1] + steps_by_rows.get(size, 0))
        rows.append(rows[-1] + size * steps_by_rows.get(size, 0))

    def wasted(first: int, last: int) -> int:
        """By the sizes from index `first` on in a program of size `last`."""
        return sizes[last] * (steps[last + 1] - steps[first]) - (rows[last + 1] - rows[first])

    costs = [wasted(0, last) for last in range(len(sizes))]
    choices: list[list[int]] = []
    for _ in range(min(count, len(sizes)) - 1):
        # The sizes up to `first` are in the programs before; -1 is to have no such program.
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
    """Share of the rows computed that nobody asked for, 0 to 1."""
    used = sum(size * steps for size, steps in steps_by_rows.items())
    computed = sum(buckets[bisect.bisect_left(buckets, size)] * steps for size, steps in steps_by_rows.items())
    return (computed - used) / computed if computed else 0.0
