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

POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "q", "documents": ["a"]},
    "/v2/rerank": {"query": "q", "documents": ["a"]},
    "/rerank": {"query": "q", "documents": ["a"]},
    "/v1/score": {"text_1": "q", "text_2": "a"},
    "/score": {"text_1": "q", "text_2": "a"},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/encode": {"text": "a"},
}
"""A body for each route that pools."""


def only(task: PooledTask, **changes: Any) -> ModelTask:
    """Return the task of a server that only pools."""
    return ModelTask(generates=False, pooled=dataclasses.replace(task, **changes))


def both(task: PooledTask, **changes: Any) -> ModelTask:
    """Return the task of a server that generates, too."""
    return ModelTask(generates=True, pooled=dataclasses.replace(task, **changes))


def task_of(path: str) -> ModelTask:
    """Return the task of a server that generates, and pools what the route `path` answers with."""
    return both(LABELS if path == "/classify" else EMBED)
