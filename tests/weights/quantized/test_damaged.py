"""Quantized checkpoints that are damaged, or not what their config says: errors name the tensor and what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve.errors import ConfigError
from jaxserve.model_source import read_config, resolve
from jaxserve.models.registry import family, parse_model_config
from jaxserve.quant import choose_weights, hold_weights, method_of
from jaxserve.weights import build_params, check_tensors, open_weights, stored_types
from pallas_kernels.target import CPU
from tests.weights.conftest import on_one_device
from tests.weights.quantized.fixtures import QUANTIZED

Tensors = dict[str, np.ndarray[Any, Any]]
DOWN, UP = (f"model.layers.0.mlp.{name}_proj" for name in ("down", "up"))


def changed(name: str, folder: Path, change: Any = None, **config: Any) -> Path:
    """Copy a fixture with other tensors, or other fields of its `quantization_config`."""
    shutil.copytree(QUANTIZED / name, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(raw))
    if change is not None:
        with safe_open(folder / "model.safetensors", framework="numpy") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  it is no mapping
        change(tensors)
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def load(folder: Path) -> Any:
    """Load the weights as a CPU holds them, after the checks that come before programs are compiled."""
    source = resolve(str(folder))
    config = parse_model_config(read_config(source))
    check_tensors(source, config)
    abstract = family(config).abstract(config, np.dtype("bfloat16"))
    stored = stored_types(source, config)
    method = method_of(config.quantization, stored)
    made = choose_weights("auto", abstract, stored, method, target=CPU, dtype=np.dtype("bfloat16"), tensor=1)
    tree = hold_weights(abstract, made.forms)
    reader = open_weights(source, tree, dense=abstract, quantization=config.quantization)
    return build_params(tree, on_one_device(tree), reader)


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def cut(name: str) -> Any:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:-1])


def poison(name: str) -> Any:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[3] = np.nan

    return change


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("awq", drop(f"{DOWN}.qzeros"), rf"not readable: {DOWN}.weight \({DOWN}.qzeros is missing\)"),
        ("awq", drop(f"{DOWN}.qweight"), rf"missing: {DOWN}.weight.* left over .*: {DOWN}.qzeros, {DOWN}.scales"),
        ("awq", cut(f"{DOWN}.scales"), rf"{DOWN}.scales has shape \[2, 128\] instead of \[3, 128\]"),
        ("awq", cut(f"{DOWN}.qweight"), rf"{DOWN}.weight \[128, 383\] instead of \[128, 384\]"),
        ("awq", poison(f"{DOWN}.scales"), rf"tensor {DOWN}.weight \(its scales\) holds NaN or infinity"),
        ("gptq_act_order", drop(f"{DOWN}.g_idx"), rf"{DOWN}.g_idx is missing"),
        ("gptq_act_order", cut(f"{DOWN}.qzeros"), rf"{DOWN}.qzeros has shape"),
        ("compressed_w4a16_asymmetric", drop(f"{DOWN}.weight_zero_point"), rf"{DOWN}.weight_zero_point is missing"),
        ("compressed_w8a8_int8_static", drop(f"{DOWN}.input_scale"), rf"{DOWN}.input_scale is missing"),
        ("compressed_w8a16", drop(f"{UP}.weight_scale"), rf"{UP}.weight_scale is missing"),
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


def test_undamaged_copies_are_loaded(tmp_path: Path) -> None:
    """The fixtures that the tests above damage."""
    assert load(changed("awq", tmp_path / "a", lambda tensors: None)) is not None
    assert load(changed("gptq_act_order", tmp_path / "b")) is not None
