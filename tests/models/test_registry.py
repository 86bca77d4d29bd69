"""Which architectures are refused, and how."""

from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.models import exaone4
from jaxserve.models.registry import parse_model_config
from tests.models.hub_configs import HUB


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


def test_without_a_window_exaone_rotates_every_layer() -> None:
    raw = {**HUB["EXAONE-4.0-32B"][0], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    for window, rotated in ((None, (True, True)), (4096, (False, False))):
        config = parse_model_config({**raw, "sliding_window": window})
        assert isinstance(config, exaone4.Config)
        assert config.rotated == rotated
