"""Quantized checkpoints that are damaged, or not what their config says: errors name the tensor and what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import read_config, resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.quant import choose_weights, hold_weights, method_of
from jaxserve.weights import build_params, check_tensors, open_weights, stored_types
from pallas_kernels.target import CPU
from tests.weights.conftest import on_one_device
from tests.weights.quantized.fixtures import Tensors, changed

DOWN, UP = (f"model.layers.0.mlp.{name}_proj" for name in ("down", "up"))


def load(folder: Path) -> Any:
    """Load the weights as a CPU holds them, after the checks that come before programs are compiled."""
    source = resolve(str(folder))
    config = parse_model_config(read_config(source))
    check_tensors(source, config)
    abstract = abstract_params(LaidOutModel(config), np.dtype("bfloat16"))
    stored = stored_types(source, config)
    method = method_of(config.quantization, stored)
    made = choose_weights("auto", abstract, stored, method, target=CPU, dtype=np.dtype("bfloat16"))
    tree = hold_weights(abstract, made.forms)
    reader = open_weights(source, tree, dense=abstract, quantization=config.quantization)
    return build_params(tree, on_one_device(tree), reader)


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def cut(name: str) -> Any:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:-1])


def put(name: str, value: float) -> Any:
    """Write a number into the last place of a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] = value

    return change


def narrow(name: str) -> Any:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:, :-1])


def flatten(name: str) -> Any:
    return lambda tensors: tensors.__setitem__(name, tensors[name].reshape(-1))


def cast(name: str, dtype: str) -> Any:
    return lambda tensors: tensors.__setitem__(name, tensors[name].astype(dtype))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("awq", drop(f"{DOWN}.qzeros"), rf"not readable: {DOWN}.weight \({DOWN}.qzeros is missing\)"),
        ("awq", drop(f"{DOWN}.qweight"), rf"missing: {DOWN}.weight.* left over .*: {DOWN}.qzeros, {DOWN}.scales"),
        ("awq", cut(f"{DOWN}.scales"), rf"{DOWN}.scales has shape \[2, 128\] instead of \[3, 128\]"),
        ("awq", cut(f"{DOWN}.qweight"), rf"{DOWN}.weight \[128, 383\] instead of \[128, 384\]"),
        ("awq", put(f"{DOWN}.scales", np.nan), rf"tensor {DOWN}.weight \(its scales\) holds NaN or infinity"),
        ("gptq_act_order", drop(f"{DOWN}.g_idx"), rf"{DOWN}.g_idx is missing"),
        ("gptq_act_order", cut(f"{DOWN}.qzeros"), rf"{DOWN}.qzeros has shape"),
        ("compressed_w4a16_asymmetric", drop(f"{DOWN}.weight_zero_point"), rf"{DOWN}.weight_zero_point is missing"),
        ("compressed_w8a8_int8_static", drop(f"{DOWN}.input_scale"), rf"{DOWN}.input_scale is missing"),
        ("compressed_w8a16", drop(f"{UP}.weight_scale"), rf"{UP}.weight_scale is missing"),
        ("awq", cast(f"{DOWN}.qweight", "int64"), rf"{DOWN}.weight \(its type is I64, and the config says awq"),
        ("awq", cast(f"{DOWN}.qzeros", "int64"), rf"{DOWN}.qzeros has type I64 instead of I32"),
        ("awq", cast(f"{DOWN}.scales", "float64"), rf"{DOWN}.scales has type F64 instead of F32 or F16 or BF16"),
        ("gptq", put(f"{DOWN}.g_idx", 99), rf"{DOWN}.g_idx has group 99 of only"),
        ("gptq_act_order", put(f"{DOWN}.g_idx", -5), rf"{DOWN}.g_idx has group -5 of only"),
        ("gptq_act_order", put(f"{DOWN}.g_idx", 0), rf"{DOWN}.g_idx has \d+ inputs in group 0 instead of"),
        ("compressed_w4a16", put(f"{UP}.weight_shape", 9), rf"{UP}.weight \[128, 9\] instead of \[128, 256\]"),
        ("compressed_w4a16", narrow(f"{DOWN}.weight_packed"), rf"{DOWN}.weight_packed has shape"),
        ("fp8_blocks_qwen3", flatten(f"{UP}.weight_scale_inv"), rf"{UP}.weight_scale_inv has shape \[2\] instead of"),
        ("fp8", put(f"{UP}.weight_scale", 0), rf"{UP}.weight_scale holds the scale 0; the magnitude of scales must be"),
        ("fp8_blocks_qwen3", put(f"{UP}.weight_scale_inv", 1e30), rf"{UP}.weight_scale_inv holds the scale 1.*e\+30"),
        ("compressed_w8a8_int8", put(f"{UP}.weight_scale", 1e-40), rf"{UP}.weight_scale holds the scale 9.*e-41"),
        ("compressed_fp8_static", put(f"{UP}.input_scale", 1e-40), rf"{UP}.input_scale must be from 1e-15 to 1e\+06"),
        ("fp8_static", put(f"{UP}.input_scale", np.nan), rf"{UP}.input_scale must be from 1e-15 to 1e\+06, it is nan"),
    ],
)
def test_a_damaged_tensor_is_named(name: str, change: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load(changed(name, tmp_path, change))


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("awq", {"group_size": 64}, r"scales has shape \[1, 384\] instead of \[2, 384\]"),
        ("gptq", {"bits": 8}, "weight .* instead of"),
        ("gptq_8bit", {"bits": 4}, "weight .* instead of"),
        ("fp8", {"weight_block_size": [128, 128]}, "weight_scale has shape"),
    ],
)
def test_a_config_of_another_checkpoint_is_refused(name: str, config: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        load(changed(name, tmp_path, **config))


def test_a_quantized_checkpoint_needs_its_config(tmp_path: Path) -> None:
    folder = changed("awq", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"it has .*\.qweight\), but its config.json has no quantization_config"):
        load(folder)


def test_undamaged_copies_are_loaded(tmp_path: Path) -> None:
    """The fixtures that the tests above damage."""
    assert load(changed("awq", tmp_path / "a", lambda tensors: None)) is not None
    assert load(changed("gptq_act_order", tmp_path / "b")) is not None
