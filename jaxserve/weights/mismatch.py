"""The error for a checkpoint that doesn't fit its model: it lists all mismatches at once, each with tensor names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.error_texts import join_first
from jaxserve.errors import ConfigError

_NAMES_SHOWN = 10


def raise_mismatch(description: str, mismatches: Iterable[tuple[str, Sequence[str]]], advice: str) -> None:
    """Raise `ConfigError` if any of `mismatches`, pairs of a description and tensor names, has names."""
    parts = [f"{_count(names)} {what}: {join_names(names)}" for what, names in mismatches if names]
    if parts:
        raise ConfigError(f"{description} doesn't fit the model its config describes: {'; '.join(parts)}. {advice}")


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return join_first(names, _NAMES_SHOWN)


def _count(names: Sequence[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
