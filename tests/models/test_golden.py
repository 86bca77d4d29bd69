"""Compares each configuration's logits with Hugging Face's, from fixtures made by scripts/make_golden.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.model_source import resolve
from jaxserve.models.config import parse_model_config
from jaxserve.models.registry import family
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights.arrays import build_params
from jaxserve.weights.load import checkpoint_reader
from jaxserve.weights.open import open_source
from tests.models.forward import cpu_mesh, prompt_logits
from tests.selection import grid

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


QUICK = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "smollm2")


@pytest.mark.parametrize("name", grid(sorted(path.name for path in GOLDEN.iterdir()), QUICK.__contains__))
def test_logits_equal_hugging_face(name: str) -> None:
    folder = GOLDEN / name
    config = parse_model_config(json.loads((folder / "config.json").read_text()))
    model = family(config)
    abstract = model.abstract(config, np.dtype(np.float32))
    source = open_source(resolve(str(folder)))
    reader = checkpoint_reader(abstract, source, model.tensor_mappings(config), ignored=model.ignored)
    params = build_params(abstract, shardings(cpu_mesh(), abstract), reader)
    golden = np.load(folder / "golden.npz")
    for i in range(3):
        logits = prompt_logits(config, params, golden[f"ids_{i}"].tolist(), size=64)
        np.testing.assert_allclose(logits, golden[f"logits_{i}"], atol=1e-4, rtol=0)
