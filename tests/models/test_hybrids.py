"""Layers that keep a state: their logits don't depend on the chunks of a prompt."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params
from jaxserve.weights.arrays import build_params
from jaxserve.weights.open import open_weights
from tests.models.forward import logits_by_chunks
from tests.models.golden import folder_of, golden_config, source_of
from tests.weights.conftest import on_one_device

NAME = "qwen3_5_moe"


@functools.cache
def _loaded() -> tuple[AnyModel, Any]:
    model: AnyModel = LaidOutModel(golden_config(NAME))
    abstract = abstract_params(model, np.dtype(np.float32))
    return model, build_params(abstract, on_one_device(abstract), open_weights(source_of(NAME), abstract))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([7, 11, 17, 13], id="odd chunks"),
        pytest.param([16, 32], id="whole blocks"),
        pytest.param([30, *[1] * 18], id="decodes"),
    ],
)
def test_logits_do_not_depend_on_chunks(lengths: list[int]) -> None:
    golden = np.load(folder_of(NAME) / "golden.npz")
    model, params = _loaded()
    found = logits_by_chunks(model, params, golden["ids_2"].tolist(), lengths, size=32)
    np.testing.assert_allclose(found, golden["logits_2"], atol=1e-4, rtol=0)
