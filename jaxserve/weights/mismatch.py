"""How a checkpoint that doesn't fit its model is told: every fault at once, each with the names it concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.errors import ConfigError

_NAMES_SHOWN = 10


def refuse_misfit(description: str, faults: Iterable[tuple[str, Sequence[str]]], advice: str) -> None:
    """Raises `ConfigError` where there are any; a fault is what is wrong with some tensors, and their names."""
    parts = [f"{_count(names)} {what}: {listed(names)}" for what, names in faults if names]
    if parts:
        raise ConfigError(f"{description} doesn't fit the model its config describes: {'; '.join(parts)}. {advice}")


def listed(names: Sequence[str]) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _count(names: Sequence[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"
