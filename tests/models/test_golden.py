"""Compares each configuration's logits with Hugging Face's, from fixtures made by scripts/make_golden.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.registry import parse_model_config
from tests.models.golden import FOLDERS, GOLDEN, golden_logits
from tests.selection import grid

VARIANTS = [name for name in FOLDERS if name.startswith(("llama_", "qwen2_", "granite4_", "olmo3_", "smollm3_"))]
"""Of one family; the other folders are one for each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(FOLDERS, lambda name: name not in VARIANTS))
def test_logits_equal_hugging_face(name: str) -> None:
    for logits, expected in golden_logits(name, shards=1):
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


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
