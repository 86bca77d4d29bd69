"""The form of the advice that the tuning rules give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.observability.sample import Sample, Settings


@dataclasses.dataclass(frozen=True)
class TuningAdvice:
    """The advice of one rule: its short name, the observed figures, and what to do about them."""

    rule: str
    figure: str
    what_to_do: str


type AdviceRule = Callable[[Sequence[Sample], Settings], TuningAdvice | None]
