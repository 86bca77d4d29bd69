"""Which architectures are refused, and how."""

from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.registry import parse_model_config


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("MambaForCausalLM", "'MambaForCausalLM' is not supported; supported: .*LlamaForCausalLM"),
        ("ChatGLMModel", "'ChatGLMModel' is not supported; GLM-4 is served from .* -hf"),
    ],
)
def test_an_unknown_architecture_is_refused_with_what_to_serve_instead(architecture: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model_config({"architectures": [architecture]})
