"""Which draft models a deployment takes, and what they cost it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import resolve
from jaxserve.models.draft_heads import eagle
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.execution.startup import open_readers
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from pallas_kernels.paged_attention import KernelTarget
from tests.draft_heads import HEADS, write_checkpoint
from tests.models.golden import GOLDEN
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
        (HEADS["eagle3"], {}, "a head that drafts, no model; set speculative_method to eagle3"),
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
    assert [(spec.num_layers, spec.window) for spec in drafting.model.kv_specs()] == [(3, None)]


def _deploy_head(folder: Path, method: str, head: dict[str, Any], model: dict[str, Any], **options: Any) -> Deployment:
    """Deploy the tiny model, changed by fields of `model`, with a head of its sizes, changed by those of `head`."""
    own = {**CONFIG, **model}
    del own["model_type"]
    (folder / "config.json").write_text(json.dumps(own | HEADS.get(method, {}) | head))
    config = EngineConfig(
        dtype="float32",
        load_format="dummy",
        speculative_method=method,  # type: ignore[arg-type]
        speculative_model=None if method == "mtp" else str(folder),
        **options,
    )
    return deploy(config, parse_model_config({**CONFIG, **model}), CPU)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_takes_weights_features_and_a_place_on_each_page(tmp_path: Path, method: str) -> None:
    plain = deploy(EngineConfig(dtype="float32"), parse_model_config({**CONFIG, "num_hidden_layers": 4}), CPU)
    made = _deploy_head(tmp_path, method, {}, {"num_hidden_layers": 4})
    layer, features = 2 * 2 * 16 * 4, 32 * 4
    assert made.sizes.footprint.kv_per_token == (plain.sizes.footprint.kv_per_token[0] + layer + features,)
    assert made.model.taps == ((1, 2, 3) if method == "eagle3" else ())
    assert made.capacity.max_drafts == 4


def test_steps_of_one_token_leave_no_room_for_drafts(tmp_path: Path) -> None:
    one = {"max_running_requests": 1, "max_num_batched_tokens": 1}
    assert _deploy_head(tmp_path, "eagle", {}, {}, **one).capacity.draft_buckets == (1,)


def test_a_checkpoint_without_the_layer_that_its_config_counts(tmp_path: Path) -> None:
    fields = MIXTURE | {"num_nextn_predict_layers": 1}
    model = parse_model_config(fields)
    folder = write_checkpoint(tmp_path / "model", fields, abstract_params(LaidOutModel(model), np.dtype(np.float32)))
    config = EngineConfig(model=str(folder), dtype="float32", speculative_method="mtp")
    with pytest.raises(ConfigError, match=r"lacks the layer that drafts \(model\.layers\.2\.\*\), as many quantized"):
        open_readers(deploy(config, model, CPU), resolve(str(folder)))


WHERE_OTHERS_NAME_TAPS = [
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 7], "parallel_draft_step": 1}}, (2, 4, 7)),
    ({"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [2, 4, 7]}, (2, 4, 7)),
    ({"eagle_config": {}}, (2, 5, 7)),
]


@pytest.mark.parametrize(("fields", "taps"), WHERE_OTHERS_NAME_TAPS)
def test_which_layers_a_head_of_eagle3_sees(tmp_path: Path, fields: dict[str, Any], taps: tuple[int, ...]) -> None:
    assert _deploy_head(tmp_path, "eagle3", fields, {"num_hidden_layers": 10}).model.taps == taps


def test_a_head_in_the_form_of_speculators(tmp_path: Path) -> None:
    sizes = {name: value for name, value in CONFIG.items() if name not in ("architectures", "vocab_size")}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_config": {"algorithm": "eagle3"},
                "transformer_layer_config": {**sizes, "num_hidden_layers": 1, "vocab_size": 258},
                "draft_vocab_size": 200,
                "target_hidden_size": None,
                "norm_before_residual": True,
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            }
        )
    )
    config = EngineConfig(
        dtype="float32", load_format="dummy", speculative_method="eagle3", speculative_model=str(tmp_path)
    )
    drafting = deploy(config, parse_model_config({**CONFIG, "num_hidden_layers": 4}), CPU).drafting
    assert drafting is not None
    assert drafting.model is not None
    head = drafting.model.config
    assert isinstance(head, eagle.Config)
    assert (head.layer, head.norm_before_residual, head.draft_vocab, head.taps) == ("layers.0", True, 200, (0, 1, 2))


@pytest.mark.parametrize(("name", "layer"), [("Eagle3DraftModel", "layers.0"), ("LlamaForCausalLM", "midlayer")])
def test_the_layers_name_before_a_head_is_downloaded(tmp_path: Path, name: str, layer: str) -> None:
    made = _deploy_head(tmp_path, "eagle3", {"architectures": [name]}, {"num_hidden_layers": 4})
    assert made.drafting is not None
    assert made.drafting.model is not None
    head = made.drafting.model.config
    assert isinstance(head, eagle.Config)
    assert head.layer == layer


def test_a_window_that_a_head_does_not_use(tmp_path: Path) -> None:
    for_qwen = {"sliding_window": 131072, "max_window_layers": 28, "use_sliding_window": False}
    made = _deploy_head(tmp_path, "eagle3", for_qwen, {"num_hidden_layers": 4}).drafting
    assert made is not None
    assert made.model is not None
    assert made.model.config.windows == (None,)


WIDER = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("method", "head", "model", "options", "says"),
    [
        ("eagle", WIDER, {}, {}, "head for a model with hidden states of 64 numbers, those of this model .* have 32"),
        ("eagle3", {**WIDER, "target_hidden_size": 64}, {}, {}, "hidden states of 64 numbers"),
        ("eagle", {"vocab_size": 300}, {}, {}, "has a vocabulary of 300 tokens and the model one of 258"),
        ("eagle", {"num_hidden_layers": 2}, {}, {}, "a head of 2 layers is not supported"),
        ("eagle", {"num_attention_heads": 1, "num_key_value_heads": 1}, {}, {"tp_size": 2}, "can't be split over"),
        ("eagle", HEADS["eagle3"], {}, {}, "it is a head of eagle3; set speculative_method to eagle3"),
        ("eagle3", {**HEADS["eagle"], "eagle_config": None}, {}, {}, "it is a head of eagle; set speculative_method"),
        ("eagle3", {"architectures": ["MedusaModel"]}, {}, {}, "'MedusaModel' is no head of EAGLE; supported: "),
        ("eagle3", {}, {"num_hidden_layers": 2}, {}, "needs the inputs of layers 1, 2, 3 .* which has 2 layers"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, {}, {}, "should name 3 layers"),
        ("eagle3", {"eagle_config": {"use_mtp_layernorm": True}}, {}, {}, "use_mtp_layernorm"),
        ("eagle3", {"parallel_drafting": True}, {}, {}, "parallel_drafting"),
        ("eagle3", {"eagle_config": {"parallel_draft_step": 4}}, {}, {}, "parallel_draft_step=4 is not supported"),
        ("mtp", {}, {}, {}, r"this checkpoint \(LlamaForCausalLM\) has no layer that drafts; DeepSeek-V3"),
    ],
    ids=lambda value: "",
)
def test_which_heads_are_refused(
    tmp_path: Path, method: str, head: dict[str, Any], model: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        _deploy_head(tmp_path, method, head, {"num_hidden_layers": 4, **model}, **options)


def test_a_head_of_eagle3_for_a_family_other_than_llama(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "olmo2" / "config.json").read_text()) | {"num_hidden_layers": 4}
    assert _deploy_head(tmp_path, "eagle3", {"rope_scaling": None}, config).model.taps == (1, 2, 3)


def test_a_head_is_no_model_to_serve() -> None:
    with pytest.raises(ConfigError, match="it is a head that drafts for a model: give it as speculative_model"):
        parse_model_config({**CONFIG, **HEADS["eagle3"]})
