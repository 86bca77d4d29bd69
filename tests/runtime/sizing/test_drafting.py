"""Which draft models a deployment takes, and what they cost it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from pallas_kernels.paged_attention import KernelTarget
from tests.test_keystone import GROUPS, MIXTURE
from tests.tiny_model import CONFIG, write_tiny_model

CPU = DeviceFacts(KernelTarget("cpu"), 2**34, max_devices=8)


def _deploy(folder: Path, draft: dict[str, Any], **options: Any) -> Deployment:
    """Deploy the tiny model with a draft of these fields; `vocabulary` exchanges tokens of its tokenizer."""
    target, own = folder / "target", folder / "draft"
    target.mkdir()
    own.mkdir()
    write_tiny_model(target)
    vocabulary = draft.pop("vocabulary", {})
    write_tiny_model(own, **draft)
    path = own / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= vocabulary
    path.write_text(json.dumps(tokenizer))
    config = EngineConfig(
        model=str(target),
        dtype="float32",
        speculative_method="draft",
        speculative_model=str(own),
        **options,
    )
    return deploy(config, parse_model_config(CONFIG), CPU)


def test_a_draft_model_takes_weights_and_a_place_on_each_page(tmp_path: Path) -> None:
    plain = deploy(EngineConfig(dtype="float32"), parse_model_config(CONFIG), CPU)
    made = _deploy(tmp_path, {"num_hidden_layers": 1})
    own, other = made.sizes.footprint, plain.sizes.footprint
    layer = 2 * 2 * 16 * 4
    assert own.kv_per_token == (other.kv_per_token[0] + layer,)
    assert other.kv_per_token == (2 * layer,)
    assert other.weights < own.weights < 2 * other.weights
    assert made.capacity.max_drafts == 4
    assert {str(key) for key in made.program_keys} >= {"draft-1", "draft-16", "draft_read-64"}
    assert made.capacity.num_pages == plain.capacity.num_pages


@pytest.mark.parametrize(
    ("draft", "options", "says"),
    [
        ({"vocab_size": 300}, {}, "has a vocabulary of 300 tokens and the model one of 258"),
        ({"vocabulary": {"a": 98, "b": 97}}, {}, "token 98 is 'a' there"),
        (MIXTURE, {}, "is a mixture of experts, which can't draft yet"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, {"tp_size": 2}, "can't be split over tp_size=2"),
        ({"architectures": ["MambaForCausalLM"]}, {}, "draft: architecture 'MambaForCausalLM' is not supported"),
    ],
    ids=lambda value: "",
)
def test_which_draft_models_are_refused(
    tmp_path: Path, draft: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        _deploy(tmp_path, dict(draft), **options)


def test_layers_with_windows_share_the_pages_of_whole_sequences(tmp_path: Path) -> None:
    drafting = _deploy(tmp_path, {**GROUPS, "max_position_embeddings": 64}).drafting
    assert drafting is not None
    assert drafting.model is not None
    assert [(spec.num_layers, spec.window) for spec in drafting.model.kv_specs()] == [(4, None)]
