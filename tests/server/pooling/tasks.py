"""Tasks of pooled models, made by hand, and servers for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.model_source.pooling import ModelTask, PooledLayer, PooledTask, Pooling

EMBED = PooledTask(kind="embed", pooling=Pooling("last"), size=4)
RERANK = PooledTask(
    kind="classify",
    pooling=Pooling("last", (PooledLayer("yes-no", 8, 4),)),
    size=4,
    activation="softmax",
    labels=("a", "b", "no", "yes"),
    scores_pairs=True,
)
LABELS = dataclasses.replace(RERANK, scores_pairs=False)
REWARD = dataclasses.replace(LABELS, labels=(), activation="none")


def only(task: PooledTask, **changes: Any) -> ModelTask:
    """Return the task of a server that only pools."""
    return ModelTask(generates=False, pooled=dataclasses.replace(task, **changes))


def both(task: PooledTask, **changes: Any) -> ModelTask:
    """Return the task of a server that generates, too."""
    return ModelTask(generates=True, pooled=dataclasses.replace(task, **changes))
