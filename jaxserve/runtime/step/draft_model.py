"""Drafts by a smaller model of the same vocabulary, or by a head of the model, which run on the same devices."""

from __future__ import annotations

import dataclasses

from jaxserve.models.layout import AnyModel
from jaxserve.models.registry import is_draft_head


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A model that drafts at most `max_drafts` tokens. Its weights are the second of a pair of trees of parameters.

    A head needs the features of each token before it: see `jaxserve.models.draft_heads`.
    """

    model: AnyModel
    max_drafts: int

    @property
    def is_head(self) -> bool:
        """Whether it is a head of the model."""
        return is_draft_head(self.model.config)

    @property
    def last(self) -> int:
        """The number of last tokens of a sequence that drafting computes before it draws the first draft token.

        A model has no keys for the last draft token, if that was accepted. A head has keys for all draft tokens, but
        computed them from its own features instead of the model's.
        """
        return 1 + self.max_drafts if self.is_head else 2
