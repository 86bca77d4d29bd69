"""Compares each configuration's logits with Hugging Face's, from fixtures made by scripts/make_golden.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import resolve
from jaxserve.models.registry import family, is_ignored, parse_model_config
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights.arrays import build_params
from jaxserve.weights.load import checkpoint_reader
from jaxserve.weights.open import open_source
from tests.models.forward import cpu_mesh, prompt_logits
from tests.selection import grid

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


FOLDERS = sorted(path.name for path in GOLDEN.iterdir())
VARIANTS = [name for name in FOLDERS if name.startswith(("cohere2_", "gemma2_", "llama_", "qwen2_"))]
"""Of one family; the other folders are one for each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(FOLDERS, lambda name: name not in VARIANTS))
def test_logits_equal_hugging_face(name: str) -> None:
    folder = GOLDEN / name
    config = parse_model_config(json.loads((folder / "config.json").read_text()))
    abstract = family(config).abstract(config, np.dtype(np.float32))
    reader = checkpoint_reader(abstract, open_source(resolve(str(folder))), ignored=is_ignored)
    params = build_params(abstract, shardings(cpu_mesh(), abstract), reader)
    golden = np.load(folder / "golden.npz")
    for i in range(3):
        logits = prompt_logits(config, params, golden[f"ids_{i}"].tolist(), size=64)
        np.testing.assert_allclose(logits, golden[f"logits_{i}"], atol=1e-4, rtol=0)


REFUSED = [
    pytest.param(name, change, id=f"{name}-{next(iter(change))}")
    for name in FOLDERS
    if (file := GOLDEN / name / "refused.json").is_file()
    for change in json.loads(file.read_text())
]


@pytest.mark.parametrize(("name", "change"), REFUSED)
def test_a_config_with_one_other_field_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    text = raw.get("text_config", raw)
    text.update(change)
    [field] = change
    with pytest.raises(ConfigError, match=field):
        parse_model_config(raw)
