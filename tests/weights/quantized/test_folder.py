"""Quantized folders of every format, compared weight by weight with what their packers quantized."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.model_source import read_config, resolve
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.weights import check_tensors, open_source
from jaxserve.weights.quantized.folder import QuantizedFolder
from pallas_kernels.quantized_matmul import FACTORS
from tests.weights.quantized.fixtures import MODELS, QUANTIZED, dequantized


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
