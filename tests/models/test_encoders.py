"""Compares encoders with transformers and sentence-transformers, by fixtures of scripts/make_encoders.py: all texts of
a fixture are packed in one batch, with padding after them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jaxserve.config.served_checkpoint import ServedCheckpoint
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights import build_params, open_weights
from tests.models.encoding import hidden_states, packed_texts
from tests.models.forward import cpu_mesh
from tests.models.pooled import ENCODERS, cases, pool, pooled_source, served


@functools.cache
def loaded(name: str) -> tuple[ServedCheckpoint, AnyModel, Any]:
    """Return a fixture, its model, and its parameters in float32."""
    source = pooled_source(name)
    found = served(source)
    model = LaidOutModel(parse_model_config(found.raw, found.where, found.task))
    abstract = abstract_params(model, np.dtype(np.float32))
    return found, model, build_params(abstract, shardings(cpu_mesh(), abstract), open_weights(source, abstract))


def vectors(name: str, model: AnyModel, params: Any) -> list[np.ndarray]:
    """Return the vector of each case of a fixture."""
    own = cases(name)
    batch = packed_texts([case.ids for case in own], [case.second_start for case in own])
    hidden = hidden_states(model, params, batch)
    starts = batch.query_starts
    return [
        np.array(pool(model.config, params.pooled, hidden[start : start + len(case.ids)], np.int32(len(case.ids))))
        for start, case in zip(starts, own)
    ]


def difference(name: str, model: AnyModel, params: Any) -> float:
    """Return the largest difference of any number of the vectors to the expected ones."""
    pairs = zip(vectors(name, model, params), cases(name), strict=True)
    return max(float(np.abs(found - case.vector).max()) for found, case in pairs)


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_those_of_transformers(name: str) -> None:
    _, model, params = loaded(name)
    assert difference(name, model, params) < 1e-4
