"""Drafts by a smaller model of the same vocabulary, which runs on the same devices."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxserve.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A model that drafts at most `max_drafts` tokens. Its weights are the second of a pair of trees of parameters."""

    model: ModelConfig
    max_drafts: int


@dataclasses.dataclass(frozen=True)
class DraftKey:
    """Identifies a program of a draft model: `draft` makes drafts for `size` rows, `read` reads `size` tokens."""

    kind: Literal["draft", "read"]
    size: int

    def __str__(self) -> str:
        return f"{'draft' if self.kind == 'draft' else 'draft_read'}-{self.size}"
