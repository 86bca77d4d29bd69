"""Chooses the sizes that programs are compiled for: row counts of decode steps and token counts of mixed steps.

Decode sizes follow SGLang's CUDA-graph rule: finely spaced up to `cuda_graph_max_bs`, powers of two beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

# Fine sizes: (up to this size, spaced by), and the spacing beyond the last.
_SPACING = ((32, 8), (160, 16))
_WIDEST_SPACING = 32


def decode_buckets(
    max_running: int, *, max_fine: int | None, requested: Sequence[int] | None, multiple: int = 1
) -> tuple[int, ...]:
    """Return ascending row counts, all rounded up to a `multiple`, the last of which holds `max_running`.

    `requested` (`--cuda-graph-bs`) replaces the fine spacing. If `max_fine` is None, on a CPU, sizes are few (1, then 8
    doubled again and again), as each program costs seconds of start-up.
    """
    if requested is not None:
        sizes = {min(size, max_running) for size in requested}
    elif max_fine is None:
        sizes = {1} | {8 * 2**i for i in range(12)}
    else:
        sizes = _fine(min(max_fine, max_running)) | {2**i for i in range(16) if 2**i > max_fine}
    sizes = {size for size in sizes if size < max_running} | {max_running}
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))


def fine_decode_rows(max_running: int, *, max_fine: int | None, requested: Sequence[int] | None) -> int:
    """Return the largest batch size that is finely spaced or was requested: up to it the log has `cuda graph: True`."""
    if requested is not None:
        return max(requested)
    return max_running if max_fine is None else max_fine


def _fine(max_fine: int) -> set[int]:
    sizes, low = {1, 2, 4}, 0
    for high, step in (*_SPACING, (max_fine, _WIDEST_SPACING)):
        sizes |= set(range(low + step, high + 1, step))
        low = high
    return {size for size in sizes if size < max_fine} | {max_fine}


def token_buckets(max_tokens: int, *, smallest: int) -> tuple[int, ...]:
    """Return the token counts of mixed steps: `smallest` doubled while below `max_tokens`, and `max_tokens`."""
    sizes = [max_tokens]
    size = smallest
    while size < max_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sorted(sizes))


def smallest_fitting(buckets: Sequence[int], size: int) -> int:
    """Return the smallest bucket that holds `size`; the caller makes sure that one does."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise AssertionError(f"{size} is larger than every bucket {list(buckets)}")
