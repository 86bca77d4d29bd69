"""Which sizes get a program: row counts of decode steps, token counts of mixed steps.

Decode sizes follow SGLang's CUDA-graph rule: up to `cuda_graph_max_bs` finely spaced, beyond it powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence

# (up to this size, in steps of); beyond the last, in steps of 32.
_SPACING = ((32, 8), (160, 16))
_WIDEST_STEP = 32


def decode_buckets(max_running: int, *, max_fine: int | None, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Ascending row counts, the last of which holds `max_running`.

    `asked` (`--cuda-graph-bs`) replaces the spacing. Without `max_fine` there are few, 1, then 8 doubled, as each
    program costs seconds of start-up on a CPU.
    """
    if asked is not None:
        sizes = {min(size, max_running) for size in asked}
    elif max_fine is None:
        sizes = {1} | {8 * 2**i for i in range(12)}
    else:
        sizes = _fine(min(max_fine, max_running)) | {2**i for i in range(16) if 2**i > max_fine}
    return tuple(sorted({size for size in sizes if size < max_running} | {max_running}))


def fine_decode_rows(max_running: int, *, max_fine: int | None, asked: Sequence[int] | None) -> int:
    """Up to which batch size the programs are finely spaced, or were asked for: `cuda graph: True` in the log."""
    if asked is not None:
        return max(asked)
    return max_running if max_fine is None else max_fine


def _fine(max_fine: int) -> set[int]:
    sizes, low = {1, 2, 4}, 0
    for high, step in (*_SPACING, (max_fine, _WIDEST_STEP)):
        sizes |= set(range(low + step, high + 1, step))
        low = high
    return {size for size in sizes if size < max_fine} | {max_fine}


def token_buckets(max_tokens: int, *, smallest: int) -> tuple[int, ...]:
    """Token counts of mixed steps: powers of two from `smallest` below `max_tokens`, and `max_tokens`."""
    sizes = [max_tokens]
    size = smallest
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sorted(sizes))


def smallest_fitting(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`; the caller has made sure that one does."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise AssertionError(f"{size} is larger than every bucket {list(buckets)}")
