"""What the host makes of a pooled vector: an embedding, or one of each token, values of labels, or the relevance of a
document.

The engine computes the vector; nothing here knows requests or responses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.model_source.pooling import LabelActivation, PooledTask

type Vector = NDArray[np.float32]
# As torch's `normalize` has it.
_LEAST_LENGTH = 1e-12


def read_vector(data: bytes | None) -> Vector:
    """Return the vector of an event. Raises `RequestFailedError` if it has numbers that aren't finite."""
    vector = np.frombuffer(data or b"", np.float32)
    if not vector.size or not np.isfinite(vector).all():
        raise RequestFailedError(
            "the model computed numbers that are not finite (NaN or infinity): its weights or its dtype can't "
            "represent this text"
        )
    return vector


def check_dimensions(dimensions: int | None, task: PooledTask) -> None:
    """Raise `InvalidRequestError` unless embeddings may be cut to these dimensions."""
    if dimensions is None:
        return
    allowed = task.dimensions or range(1, task.size + 1)
    if dimensions not in allowed and dimensions != task.size:
        choices = ", ".join(map(str, sorted({*task.dimensions, task.size})))
        raise InvalidRequestError(
            f"dimensions must be {'one of ' + choices if task.dimensions else f'in [1, {task.size}]'}, for this model; "
            f"got {dimensions}",
            param="dimensions",
        )


def embedding(
    vector: Vector, task: PooledTask, *, dimensions: int | None = None, normalize: bool | None = None
) -> Vector:
    """Return the embedding: the first `dimensions` numbers, then normalized to length 1, if the model's are, or as
    `normalize` says. If a model makes one of each token, they are rows."""
    cut = by_token(vector, task)[..., :dimensions].astype(np.float64)
    if task.normalize if normalize is None else normalize:
        cut /= np.maximum(np.linalg.norm(cut, axis=-1, keepdims=True), _LEAST_LENGTH)
    return cut.astype(np.float32)


def by_token(vector: Vector, task: PooledTask) -> Vector:
    """Return a vector as it is, or with a row for each token if a model makes one of each."""
    return vector.reshape(-1, task.size) if task.pooling.method == "all" else vector


def label_values(vector: Vector, activation: LabelActivation) -> list[float]:
    """Return a value for each label, from its logits."""
    logits = vector.astype(np.float64)
    match activation:
        case "sigmoid":
            values = np.exp(-np.logaddexp(0.0, -logits))
        case "softmax":
            values = np.exp(logits - np.logaddexp.reduce(logits))
        case "none":
            values = logits
    numbers: list[float] = values.tolist()
    return numbers


def best_label(values: list[float], task: PooledTask) -> str:
    """Return the label with the largest value."""
    best = max(range(len(values)), key=values.__getitem__)
    return task.labels[best] if best < len(task.labels) else f"LABEL_{best}"


def relevance(vector: Vector, task: PooledTask, *, activates: bool = True) -> float:
    """Return how well a document answers a query, from the logits of their pair.

    Without activation, two labels of which one is right give the difference of their logits, as one label would.
    """
    if activates and task.activation != "none":
        return label_values(vector, task.activation)[-1]
    return float(vector[-1]) - (float(vector[0]) if vector.size == 2 else 0.0)


def similarity(query: Vector, document: Vector, task: PooledTask) -> float:
    """Return the cosine of the angle between two vectors.

    Of vectors for each token, return the sum over those of the query of their largest products with one of the document
    (ColBERT's late interaction, https://arxiv.org/abs/2004.12832).
    """
    if task.pooling.method == "all":
        left, right = (embedding(each, task).astype(np.float64) for each in (query, document))
        return float((left @ right.T).max(axis=1).sum())
    left, right = query.astype(np.float64), document.astype(np.float64)
    return float(left @ right / max(float(np.linalg.norm(left) * np.linalg.norm(right)), _LEAST_LENGTH))
