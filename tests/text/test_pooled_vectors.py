from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.model_source.pooling import Pooling
from jaxserve.text.pooled_vectors import (
    best_label,
    check_dimensions,
    embedding,
    label_values,
    read_vector,
    relevance,
    similarity,
)
from tests.server.pooling.tasks import EMBED, RERANK

VECTOR = np.asarray([3, 4, 12, 84], np.float32)


def test_numbers_that_are_not_finite_are_an_error():
    assert read_vector(VECTOR.tobytes()).tolist() == VECTOR.tolist()
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(RequestFailedError, match="not finite"):
            read_vector(np.asarray([1, wrong], np.float32).tobytes())
    with pytest.raises(RequestFailedError):
        read_vector(None)


def test_embeddings_are_cut_and_then_normalized():
    np.testing.assert_allclose(embedding(VECTOR, EMBED, dimensions=2), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(embedding(VECTOR, EMBED), VECTOR / 85, rtol=1e-6)
    assert embedding(VECTOR, EMBED, normalize=False).tolist() == VECTOR.tolist()
    raw = dataclasses.replace(EMBED, normalize=False)
    assert embedding(VECTOR, raw, dimensions=1).tolist() == [3]
    assert embedding(VECTOR, raw, normalize=True).dtype == np.float32
    assert embedding(np.zeros(4, np.float32), EMBED).tolist() == [0] * 4


def test_dimensions_of_a_model():
    for count in (None, 1, 4):
        check_dimensions(count, EMBED)
    for count in (0, 5):
        with pytest.raises(InvalidRequestError, match=r"dimensions must be in \[1, 4\]"):
            check_dimensions(count, EMBED)
    listed = dataclasses.replace(EMBED, dimensions=(2, 3))
    check_dimensions(4, listed)
    with pytest.raises(InvalidRequestError, match="one of 2, 3, 4"):
        check_dimensions(1, listed)


def test_values_of_labels():
    logits = np.asarray([0.5, -1, 2], np.float32)
    np.testing.assert_allclose(label_values(logits, "softmax"), np.exp(logits) / np.exp(logits).sum(), rtol=1e-6)
    np.testing.assert_allclose(label_values(logits, "sigmoid"), 1 / (1 + np.exp(-logits)), rtol=1e-6)
    assert label_values(logits, "none") == [0.5, -1, 2]
    extreme = np.asarray([-1e30, 1e30], np.float32)
    assert label_values(extreme, "softmax") == label_values(extreme, "sigmoid") == [0, 1]
    assert best_label([0.1, 0.7, 0.2, 0], RERANK) == "b"
    assert best_label([1, 2], dataclasses.replace(RERANK, labels=())) == "LABEL_1"


def test_the_relevance_is_that_of_the_last_label():
    choice = np.asarray([-1, 2], np.float32)
    assert relevance(choice, RERANK) == pytest.approx(1 / (1 + np.exp(-3)))
    assert relevance(choice, RERANK, activates=False) == 3, "the logit of a single label that says the same"
    assert relevance(choice, dataclasses.replace(RERANK, activation="none")) == 3
    single = dataclasses.replace(RERANK, activation="sigmoid")
    assert relevance(choice[1:], single) == pytest.approx(1 / (1 + np.exp(-2)))
    assert relevance(choice[1:], single, activates=False) == 2


def test_the_cosine_of_two_embeddings():
    assert similarity(VECTOR, VECTOR * 3, EMBED) == pytest.approx(1)
    assert similarity(VECTOR, -VECTOR, EMBED) == pytest.approx(-1)
    assert similarity(VECTOR, np.zeros(4, np.float32), EMBED) == 0


def test_an_embedding_of_each_token():
    task = dataclasses.replace(EMBED, pooling=Pooling("all"), size=2)
    assert embedding(VECTOR, task, normalize=False).tolist() == [[3, 4], [12, 84]]
    assert embedding(VECTOR, task).tolist() == [pytest.approx([0.6, 0.8]), pytest.approx([1 / 50**0.5, 7 / 50**0.5])]
    assert embedding(VECTOR, task, dimensions=1).tolist() == [[1], [1]]


def test_late_interaction():
    """Each token of the query counts with the document's token that is nearest to it."""
    task = dataclasses.replace(EMBED, pooling=Pooling("all"), size=2)
    query, document = np.asarray([1, 0, 0, 1], np.float32), np.asarray([3, 4, 0, -2, 1, 0], np.float32)
    assert similarity(query, document, task) == pytest.approx(1 + 0.8)
    assert similarity(document, query, task) == pytest.approx(0.8 + 0 + 1)
    unnormalized = dataclasses.replace(task, normalize=False)
    assert similarity(query, document, unnormalized) == pytest.approx(3 + 4)
