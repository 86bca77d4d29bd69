from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ConfigError
from jaxserve.models.layout import LaidOutModel, Stage
from jaxserve.models.registry import parse_model_config
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.kv_scales import KVScales, read_kv_scales
from tests.tiny_model import CONFIG
from tests.weights.conftest import MemorySource

MODEL = LaidOutModel(parse_model_config(CONFIG))
# Layers of two KV groups: the third one keeps whole sequences, the others a window.
GROUPS = parse_model_config(
    CONFIG
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
)


def read(model: Any = MODEL, **tensors: Any) -> KVScales | None:
    """Read scales by their names, where `1_k_scale` is that of layer 1."""
    named = {}
    for name, value in tensors.items():
        _, layer, rest = name.split("_", 2)
        named[f"model.layers.{layer}.self_attn.{rest.replace('__', '.')}"] = np.asarray(value, np.float32)
    return read_kv_scales(MemorySource(named), model)


def test_one_scale_for_all_heads_or_one_for_each() -> None:
    found = read(_0_k_scale=0.5, _0_v_scale=[0.25], _1_k_scale=[[[2.0]], [[3.0]]], _1_v_scale=4.0)
    assert found is not None
    assert found.num_layers == 2
    [group] = found.by_group
    np.testing.assert_array_equal(group, [[[0.5, 0.5], [2.0, 3.0]], [[0.25, 0.25], [4.0, 4.0]]])


def test_layers_without_scales_have_ones() -> None:
    found = read(_1_attn__k_scale=0.5, _1_attn__v_scale=0.25, _1_q_scale=7.0)
    assert found is not None
    assert found.num_layers == 1
    np.testing.assert_array_equal(found.by_group[0][:, :, 0], [[1.0, 0.5], [1.0, 0.25]])
    assert read() is None
    assert read(_0_q_scale=7.0) is None


def test_an_older_scale_of_both_counts_only_where_there_are_no_others() -> None:
    found = read(_0_kv_scale=0.5, _0_k_proj__k_scale=2.0, _0_v_proj__v_scale=3.0, _1_kv_scale=0.25)
    assert found is not None
    np.testing.assert_array_equal(found.by_group[0][:, :, 0], [[2.0, 0.25], [3.0, 0.25]])


def test_repeated_heads_repeat_their_scales() -> None:
    four = dataclasses.replace(MODEL, shards=4)
    found = read(four, _0_k_scale=[1.0, 2.0], _0_v_scale=3.0)
    assert found is not None
    np.testing.assert_array_equal(found.by_group[0][:, 0], [[1.0, 1.0, 2.0, 2.0], [3.0] * 4])


def test_each_layer_has_its_place_in_its_kv_group() -> None:
    scales = {f"_{layer}_{kind}_scale": 1.0 + layer for layer in range(3) for kind in "kv"}
    found = read(LaidOutModel(GROUPS), **scales)
    assert found is not None
    whole, window = found.by_group
    np.testing.assert_array_equal(whole[:, :, 0], [[3.0], [3.0]])
    np.testing.assert_array_equal(window[:, :, 1], [[1.0, 2.0], [1.0, 2.0]])


def test_scales_in_a_file_of_any_float_type(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{kind}_scale" for kind in "kv"]
    tensors = [np.array(0.5, np.float32), np.array([0.25], ml_dtypes.bfloat16)]
    save_file(dict(zip(names, tensors)), tmp_path / "model.safetensors")
    found = read_kv_scales(SafetensorsFolder(tmp_path), MODEL)
    assert found is not None
    np.testing.assert_array_equal(found.by_group[0][:, 0, 0], [0.5, 0.25])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"_1_k_scale": 1.0}, r"layers\.1\.self_attn\.k_scale has no counterpart v_scale in layer 1"),
        ({"_0_k_scale": 1.0, "_0_v_scale": [1.0] * 3}, r"v_scale has the shape \[3\]; layer 0 takes one scale, or one"),
        ({"_0_k_scale": 1.0, "_0_v_scale": []}, r"v_scale has the shape \[0\]"),
        ({"_0_k_scale": -1.0, "_0_v_scale": 1.0}, r"k_scale must be from 1e-15 to 1e\+06, got -1"),
        ({"_0_k_scale": 1.0, "_0_v_scale": [1.0, np.nan]}, r"v_scale must be from 1e-15 to 1e\+06, got 1, nan"),
    ],
    ids=str,
)
def test_scales_that_can_not_be_used(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**tensors)


def test_a_stage_has_the_scales_of_its_own_layers() -> None:
    scales = {f"_{layer}_{kind}_scale": 1.0 + layer for layer in range(3) for kind in "kv"}
    found = read(LaidOutModel(GROUPS, stage=Stage(1, 2, 1, 3)), **scales)
    assert found is not None
    assert found.num_layers == 2
    whole, window = found.by_group
    assert (whole.shape[1], window.shape[1]) == (1, 1)
    np.testing.assert_array_equal([one[:, :, 0] for one in (window, whole)], [[[2.0], [2.0]], [[3.0], [3.0]]])
