"""Chooses what `make test` runs of large tables and of drawn examples; `make test-full` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

FULL = os.environ.get("JAXSERVE_TESTS") == "full"


def grid(
    values: Iterable[Any], quick: Callable[[Any], bool], interpreted: Callable[[Any], bool] = lambda value: False
) -> list[Any]:
    """Return the parameters of a test. Those that aren't `quick` are marked `grid`: `make test` leaves them out."""
    return [_marked(value, {"grid": not quick(value), "interpreted": interpreted(value)}) for value in values]


def _marked(value: Any, marks: dict[str, bool]) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    chosen = [getattr(pytest.mark, name) for name, has in marks.items() if has]
    return pytest.param(*values, marks=chosen) if chosen else value


def is_interpreted(backend: str) -> bool:
    """Whether a backend's kernels are interpreted here."""
    return backend in ("triton", "mosaic_gpu", "mosaic_tpu")


def examples(full: int, quick: int | None = None) -> int:
    """Return the number of examples to draw: `full` in `make test-full`, else `quick` (by default, an eighth)."""
    if FULL:
        return full
    return max(5, full // 8) if quick is None else quick
