"""How a token chooses its experts: the rules of the models that are served."""

from __future__ import annotations

import dataclasses
from typing import Literal

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclasses.dataclass(frozen=True)
class Routing:
    """A token chooses the `choices` experts of highest score; of experts with equal scores, that of lowest index.

    `scores` are made of the router's logits: `softmax` over all experts, `sigmoid` of each, or `softmax_of_chosen`: the
    logits choose, and the weights are the softmax over the chosen ones. If the router has a correction, it is added to
    the scores by which experts are chosen, but not to the weights.

    Experts lie in `groups` of equal size, of which the `groups_chosen` best may be chosen from: those with the highest
    sum of their `best_of_group` highest scores. With `renormalize`, the weights of a token are divided by their sum.
    Then they are multiplied by `scale`.
    """

    choices: int
    scores: Scores = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    best_of_group: int = 2
