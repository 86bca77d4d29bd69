"""Each configuration's logits against Hugging Face's, from fixtures made by scripts/make_golden.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.model_source import resolve
from jaxserve.models.config import parse_model_config
from jaxserve.models.registry import family
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights.load import load_params
from jaxserve.weights.open import open_source
from tests.models.forward import cpu_mesh, prompt_logits

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_logits_equal_hugging_face(name: str) -> None:
    folder = GOLDEN / name
    config = parse_model_config(json.loads((folder / "config.json").read_text()))
    model = family(config)
    abstract = model.abstract(config, np.dtype(np.float32))
    source = open_source(resolve(str(folder)))
    params = load_params(
        abstract, source, model.placements(config), shardings(cpu_mesh(), abstract), ignored=model.ignored
    )
    golden = np.load(folder / "golden.npz")
    for i in range(3):
        logits = prompt_logits(config, params, golden[f"ids_{i}"].tolist(), size=64)
        np.testing.assert_allclose(logits, golden[f"logits_{i}"], atol=1e-4, rtol=0)
