"""Quantized folders of every format, compared weight by weight with what their packers quantized."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxserve.model_source import read_config, resolve
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family, parse_model_config
from jaxserve.quant import choose_weights, held_weights, hold_weights, stored_by_config
from jaxserve.weights import build_params, check_tensors, open_source, open_weights
from jaxserve.weights.quantized.folder import QuantizedFolder
from jaxserve.weights.quantized.mxfp4 import decode_mxfp4
from pallas_kernels.quantized_matmul import FACTORS, Backend, PackedWeight, dequantize, unpack
from pallas_kernels.target import CPU
from tests.weights.conftest import on_one_device
from tests.weights.quantized.fixtures import MODELS, QUANTIZED, dequantized

BF16 = np.dtype(jnp.bfloat16)
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def opened(name: str) -> tuple[ModelConfig, QuantizedFolder]:
    source = resolve(str(QUANTIZED / name))
    config = parse_model_config(read_config(source))
    check_tensors(source, config)
    folder = open_source(source, quantization=config.quantization)
    assert isinstance(folder, QuantizedFolder)
    return config, folder


@pytest.mark.parametrize("name", MODELS)
def test_weights_equal_those_that_were_packed(name: str) -> None:
    _, folder = opened(name)
    for tensor, expected in dequantized(name).items():
        inputs = folder.infos[tensor].shape[1]
        found = np.empty((8, inputs), np.float32)
        folder.read(tensor, (slice(0, 8), slice(0, inputs)), found)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=tensor)


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("name", MODELS)
def test_the_config_alone_tells_what_the_files_say(name: str) -> None:
    config, folder = opened(name)
    told = stored_by_config(config.quantization, family(config).abstract(config, BF16))
    found = {tensor: stored for tensor, stored in folder.stored.items() if stored.quantized}
    assert told.keys() == found.keys()
    for tensor, stored in found.items():
        assert told[tensor].scheme == stored.scheme
        assert bool(told[tensor].order) == bool(stored.order)
        assert told[tensor].factors.itemsize >= stored.factors.itemsize


def test_a_tensor_in_mxfp4_is_decoded() -> None:
    with safe_open(QUANTIZED / "mxfp4" / "model.safetensors", framework="numpy") as opened_file:
        blocks, scales = (opened_file.get_tensor(f"{EXPERTS}_{part}") for part in ("blocks", "scales"))
    np.testing.assert_array_equal(decode_mxfp4(blocks, scales), dequantized("mxfp4")[EXPERTS])
    assert np.isnan(decode_mxfp4(blocks, np.full_like(scales, 255))).all()


@pytest.mark.parametrize("name", ["gptq_act_order", "fp8_static", "compressed_fp8_blocks"])
@pytest.mark.parametrize("packed", [True, False])
def test_made_up_weights_have_the_forms_of_the_checkpoint(name: str, packed: bool) -> None:
    config, folder = opened(name)
    abstract = family(config).abstract(config, BF16)
    made = choose_weights("auto", abstract, folder.stored, "gptq", target=CPU, dtype=BF16, tensor=1)
    backend = None if packed else Backend()
    forms = {path: dataclasses.replace(form, backend=backend) for path, form in made.forms.items() if form.scheme}
    tree = hold_weights(abstract, forms)
    source = resolve(str(QUANTIZED / name))
    params = build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract, load_format="dummy"))
    for path, weight in held_weights(params).items():
        values = unpack(weight) if isinstance(weight, PackedWeight) else dequantize(weight)
        assert 0.5 < values.std() * weight.shape[-1] ** 0.5 < 4, path
    assert any(weight.order is not None for weight in held_weights(params).values()) == (name == "gptq_act_order")
