"""Quantized folders of every format, compared weight by weight with what their packers quantized."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model_source import read_config, resolve
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.quant import choose_weights, held_weights, hold_weights, stored_by_config
from jaxserve.weights import build_params, check_tensors, open_source, open_weights
from jaxserve.weights.quantized.folder import QuantizedFolder
from pallas_kernels.quantized_matmul import FACTORS, Backend, PackedWeight, dequantize, unpack
from pallas_kernels.target import CPU
from tests.weights.conftest import on_one_device
from tests.weights.quantized.fixtures import MODELS, QUANTIZED, Tensors, changed, dequantized

BF16 = np.dtype(jnp.bfloat16)
FOLDERS = [name for name in MODELS if name != "gpt_oss_mxfp4"]


def opened(name: str | Path) -> tuple[ModelConfig, QuantizedFolder]:
    source = resolve(str(QUANTIZED / name))
    config = parse_model_config(read_config(source))
    check_tensors(source, config)
    folder = open_source(source, quantization=config.quantization)
    assert isinstance(folder, QuantizedFolder)
    return config, folder


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_equal_those_that_were_packed(name: str) -> None:
    _, folder = opened(name)
    for tensor, expected in dequantized(name).items():
        inputs = folder.infos[tensor].shape[1]
        found = np.empty((8, inputs), np.float32)
        folder.read(tensor, (slice(0, 8), slice(0, inputs)), found)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=tensor)


@pytest.mark.parametrize("name", FOLDERS)
def test_numbers_and_factors_are_those_of_the_weights_in_their_order(name: str) -> None:
    _, folder = opened(name)
    for tensor in dequantized(name):
        stored, (rows, inputs) = folder.stored[tensor], folder.infos[tensor].shape
        if stored.scheme is None:
            continue
        exact = np.empty((rows, inputs), np.float32)
        folder.read(tensor, (slice(0, rows), slice(0, inputs)), exact)
        group = stored.scheme.group or inputs
        numbers, factors = np.empty((rows, inputs), np.uint8), np.empty((rows, -(-inputs // 32)), FACTORS)
        folder.read_numbers(tensor, (slice(0, rows), slice(0, inputs)), numbers)
        folder.read_factors(tensor, (slice(0, rows), slice(0, factors.shape[1])), 32, factors)
        values = numbers.view("float8_e4m3fn") if stored.scheme.numbers == "fp8" else numbers
        each = np.repeat(factors, 32, axis=1)[:, :inputs]
        order = folder.read_order(tensor)
        assert (order is not None) == bool(stored.order)
        assert group % 32 == 0
        found = values.astype(np.float32) * each["scale"] + each["minimum"]
        np.testing.assert_array_equal(found, exact if order is None else exact[:, order], err_msg=tensor)


def read(folder: QuantizedFolder, tensor: str) -> np.ndarray[Any, Any]:
    rows, inputs = folder.infos[tensor].shape
    found = np.empty((rows, inputs), np.float32)
    folder.read(tensor, (slice(0, rows), slice(0, inputs)), found)
    return found


def rename(tensors: Tensors) -> None:
    """Give the scales of fp8 the names that transformers writes."""
    for name in list(tensors):
        other = name.replace(".weight_scale", ".weight_scale_inv").replace(".input_scale", ".activation_scale")
        tensors[other] = tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "config"),
    [("fp8_static", rename, {}), ("gptq_v2", None, {"checkpoint_format": None, "format": "gptq_v2"})],
)
def test_the_names_of_other_tools_mean_the_same(name: str, change: Any, config: Any, tmp_path: Path) -> None:
    (_, expected), (_, found) = opened(name), opened(changed(name, tmp_path, change, **config))
    for tensor, stored in expected.stored.items():
        if stored.quantized:
            np.testing.assert_array_equal(read(found, tensor), read(expected, tensor), err_msg=tensor)
            if stored.scheme is not None and stored.scheme.activations == "static":
                assert found.read_input_scale(tensor) == expected.read_input_scale(tensor)


@pytest.mark.parametrize("quantized_inputs", [True, False])
def test_zeros_of_8_bits_are_used_whatever_the_config_says(quantized_inputs: bool, tmp_path: Path) -> None:
    """Numbers of 8 bits that aren't packed have zeros that aren't either."""
    _, symmetric = opened("compressed_w8a8_int8")
    name = next(name for name, stored in symmetric.stored.items() if stored.quantized)
    module = name.removesuffix(".weight")
    zeros = np.arange(symmetric.infos[name].shape[0], dtype=np.int8)[:, None] % 7

    def add_zeros(tensors: Tensors) -> None:
        tensors[f"{module}.weight_zero_point"] = zeros

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs if quantized_inputs else None,
        }
    }
    _, folder = opened(changed("compressed_w8a8_int8", tmp_path, add_zeros, config_groups=groups))
    scheme = folder.stored[name].scheme
    assert scheme is None if quantized_inputs else scheme is not None and scheme.zeros
    scales = np.empty((len(zeros), 1), FACTORS)
    symmetric.read_factors(name, (slice(0, len(zeros)), slice(0, 1)), symmetric.infos[name].shape[1], scales)
    np.testing.assert_allclose(read(folder, name), read(symmetric, name) - scales["scale"] * zeros, atol=1e-6)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_config_alone_tells_what_the_files_say(name: str) -> None:
    config, folder = opened(name)
    told = stored_by_config(config.quantization, abstract_params(LaidOutModel(config), BF16))
    found = {tensor: stored for tensor, stored in folder.stored.items() if stored.quantized}
    assert told.keys() == found.keys()
    for tensor, stored in found.items():
        assert told[tensor].scheme == stored.scheme
        assert bool(told[tensor].order) == bool(stored.order)
        assert told[tensor].factors.itemsize >= stored.factors.itemsize


@pytest.mark.parametrize("name", ["gptq_act_order", "fp8_static", "compressed_fp8_blocks"])
@pytest.mark.parametrize("packed", [True, False])
def test_made_up_weights_have_the_forms_of_the_checkpoint(name: str, packed: bool) -> None:
    config, folder = opened(name)
    abstract = abstract_params(LaidOutModel(config), BF16)
    made = choose_weights("auto", abstract, folder.stored, "gptq", target=CPU, dtype=BF16)
    backend = None if packed else Backend()
    forms = {path: dataclasses.replace(form, backend=backend) for path, form in made.forms.items() if form.scheme}
    tree = hold_weights(abstract, forms)
    source = resolve(str(QUANTIZED / name))
    params = build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract, load_format="dummy"))
    for path, weight in held_weights(params).items():
        values = unpack(weight) if isinstance(weight, PackedWeight) else dequantize(weight)
        assert 0.5 < values.std() * weight.shape[-1] ** 0.5 < 4, path
    assert any(weight.order is not None for weight in held_weights(params).values()) == (name == "gptq_act_order")
