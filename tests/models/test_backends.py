"""The kernels of a GPU take the place of several operations of a layer; interpreted here, they give the same logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.weights.dummy import dummy_params
from pallas_kernels.paged_attention import Backend
from tests.models.forward import cpu_mesh, prompt_logits
from tests.models.golden import FOLDERS, golden_logits
from tests.selection import grid
from tests.tiny_model import CONFIG

WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": {**WIDE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**WIDE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "all biases": {**WIDE, "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", grid(MODELS, "all biases".__eq__))
def test_a_gpus_kernels_give_the_same_logits(name: str) -> None:
    model = LaidOutModel(parse_model_config(MODELS[name]))
    specs = abstract_params(model, np.dtype(np.float32))
    params = dummy_params(specs, shardings(cpu_mesh(), specs), seed=0)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 21).tolist()
    expected, found = (
        prompt_logits(model, params, tokens, size=32, backend=Backend(backend)) for backend in ("reference", "triton")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


QUICK = ("gemma2", "exaone4", "ministral3")
"""Caps and windows; layers without rotation, norms of heads; scaled queries."""


@pytest.mark.interpreted
@pytest.mark.parametrize("name", grid(FOLDERS, QUICK.__contains__))
def test_a_gpus_kernels_give_hugging_faces_logits(name: str) -> None:
    for logits, expected in golden_logits(name, 1, Backend("triton")):
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
