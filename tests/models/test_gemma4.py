"""What a Gemma 4 layer has of its own: heads of its type, keys and values or those of an earlier layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import parse_model_config
from jaxserve.params import KVSpec
from jaxserve.runtime.devices.device import DeviceFacts, facts_of_target
from jaxserve.runtime.devices.target import load_target
from jaxserve.runtime.sizing.deployment import deploy
from jaxserve.runtime.sizing.roofline import roofline
from jaxserve.weights import check_tensors
from pallas_kernels.paged_attention import KernelTarget
from tests.models.golden import GOLDEN, golden_config
from tests.models.hub_configs import HUB


def test_reusing_layers_take_the_last_layer_of_their_type_that_has_keys_and_values() -> None:
    config = parse_model_config(HUB["gemma-4-E2B-it"][0])
    assert LaidOutModel(config).kv_specs() == (KVSpec(3, 1, 512), KVSpec(12, 1, 256, 512))
    sources = [config.kv_source(i) for i in range(35)]
    assert sources == [*range(15), *[13, 13, 13, 13, 14] * 4]
    places = [(int(at.index), at.group, at.reuses) for at in LaidOutModel(config).kv_layers()]
    assert places[:6] == [(0, 1, False), (1, 1, False), (2, 1, False), (3, 1, False), (0, 0, False), (4, 1, False)]
    assert places[15:20] == [(11, 1, True)] * 4 + [(2, 0, True)]


def test_heads_can_be_those_of_the_hub_or_by_layer() -> None:
    raw, _ = HUB["gemma-4-31B-it"]
    text = raw["text_config"]
    full = {"head_dim": text["global_head_dim"], "num_key_value_heads": text["num_global_key_value_heads"]}
    by_layer = {
        name: value for name, value in text.items() if name not in ("global_head_dim", "num_global_key_value_heads")
    } | {"per_layer_config": {str(i): full for i in range(5, 60, 6)}}
    config = parse_model_config(raw)
    assert config == parse_model_config({**raw, "text_config": by_layer})
    plain = {**by_layer, "per_layer_config": {}}
    same = parse_model_config({**raw, "text_config": plain})
    assert (same.kv_heads_of(0), same.kv_heads_of(5)) == ((16, 256), (16, 256))
    assert LaidOutModel(config).kv_specs() == (KVSpec(10, 4, 512), KVSpec(50, 16, 256, 1024))


def test_each_type_of_layer_repeats_its_own_kv_heads_for_shards() -> None:
    raw = json.loads((GOLDEN / "gemma4_keys_as_values" / "config.json").read_text())
    config = parse_model_config(raw)
    for shards, heads in ((1, (2, 1)), (2, (2, 2)), (4, (4, 4))):
        assert config.splits_into(shards)
        on_mesh = LaidOutModel(config, shards=shards)
        assert (on_mesh.kv_shape(0), on_mesh.kv_shape(2)) == ((heads[0], 16), (heads[1], 32))
    assert not parse_model_config({**raw, "num_attention_heads": 12, "num_global_key_value_heads": 3}).splits_into(2)


def test_a_window_as_long_as_the_context_keeps_its_own_group() -> None:
    config = parse_model_config(HUB["gemma-4-E2B-it"][0])
    device = DeviceFacts(KernelTarget("cpu"), 2**36, max_devices=8)
    made = deploy(EngineConfig(context_length=256, attention_backend="reference"), config, device)
    assert [spec.window for spec in made.kv_specs] == [None, 512]
    with pytest.raises(ConfigError, match=r"disable_hybrid_swa_memory: .*1 of size 512, 1 of size 256"):
        deploy(EngineConfig(disable_hybrid_swa_memory=True), config, device)


def test_a_step_reads_a_few_rows_of_the_table_of_layer_vectors() -> None:
    """The table is half of the weights; the working memory has room for the vectors of a step's tokens."""
    raw, billions = HUB["gemma-4-E2B-it"]
    config = parse_model_config(raw)
    made = deploy(EngineConfig(), config, facts_of_target("nvidia-h200"))
    table = config.vocab_size * 35 * 256
    read = roofline(made, load_target("nvidia-h200")).read_bytes
    assert read == pytest.approx(2 * (billions * 1e9 - table), rel=0.01)
    assert made.sizes.footprint.activations > 2048 * (4 * 12288 * 2 + 2 * 35 * 256)


def test_keys_and_values_that_a_reusing_layer_does_not_need_may_be_stored(tmp_path: Path) -> None:
    folder = GOLDEN / "gemma4"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.startswith("model.layers.0.self_attn.") and ".q" not in name]
    unused = {name.replace(".0.", ".3."): tensors[name] for name in names if ".o_proj" not in name}
    assert sorted(name.split(".")[4] for name in unused) == ["k_norm", "k_proj", "v_proj"]
    save_file({**tensors, **unused}, tmp_path / "model.safetensors")
    check_tensors(resolve(str(tmp_path)), golden_config("gemma4"))
    tensors["model.layers.0.self_attn.v_norm.weight"] = np.ones(16, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"left over .*layers\.0\.self_attn\.v_norm"):
        check_tensors(resolve(str(tmp_path)), golden_config("gemma4"))
