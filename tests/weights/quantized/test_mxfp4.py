"""gpt-oss' experts in MXFP4: held in four bits, in eight where no kernel takes four, or dequantized."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import read_config, resolve
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.quant import choose_weights, held_weights, hold_weights
from jaxserve.weights import build_params, check_tensors, open_source, open_weights, stored_types
from pallas_kernels.quantized_matmul import Backend, dequantize
from pallas_kernels.target import KernelTarget
from tests.weights.conftest import on_one_device
from tests.weights.quantized.fixtures import QUANTIZED, Tensors, changed, dequantized

NAME = "gpt_oss_mxfp4"
UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
BF16 = np.dtype(jnp.bfloat16)


def model(folder: Path = QUANTIZED / NAME) -> ModelConfig:
    return parse_model_config(read_config(resolve(str(folder))))


@pytest.mark.parametrize("name", [UP, DOWN])
def test_any_window_is_what_the_blocks_stand_for(name: str) -> None:
    source = open_source(resolve(str(QUANTIZED / NAME)), quantization=model().quantization)
    expected = dequantized(NAME)[name].swapaxes(1, 2)
    assert source.infos[name].shape == expected.shape
    for window in ((slice(0, 4), slice(0, 64), slice(0, 64)), (slice(1, 3), slice(5, 40), slice(7, 41))):
        found = np.empty([part.stop - part.start for part in window], np.float32)
        source.read(name, window, found)
        np.testing.assert_array_equal(found, expected[window])


@pytest.mark.parametrize(("platform", "numbers"), [("cuda", "fp4"), ("tpu", "int8")])
def test_experts_are_held_without_loss(platform: str, numbers: str) -> None:
    source, config = resolve(str(QUANTIZED / NAME)), model()
    abstract = abstract_params(LaidOutModel(config), BF16)
    stored = stored_types(source, config)
    target = KernelTarget(platform, capability=(8, 0) if platform == "cuda" else None)
    # Kernels of TPUs need larger weights than those of the fixture
    wide = abstract_params(LaidOutModel(dataclasses.replace(config, hidden_size=2048, expert_width=2048)), BF16)
    made = choose_weights("auto", wide, stored, "mxfp4", target=target, dtype=BF16)
    assert {scheme.numbers for scheme in made.quantized.values()} == {numbers}
    forms = {path: dataclasses.replace(form, backend=Backend(), arrangement=()) for path, form in made.forms.items()}
    tree = hold_weights(abstract, forms)
    reader = open_weights(source, tree, dense=abstract, quantization=config.quantization)
    held = held_weights(build_params(tree, on_one_device(tree), reader))
    experts = ("layers", 0, "mlp", "experts")
    up = dequantized(NAME)[UP].reshape(4, 128, 64, 2).transpose(0, 3, 2, 1)
    np.testing.assert_array_equal(dequantize(held[*experts, "up"]), up)
    np.testing.assert_array_equal(dequantize(held[*experts, "down"]), dequantized(NAME)[DOWN].swapaxes(1, 2))


def _nan(tensors: Tensors) -> None:
    scales = tensors[f"{DOWN}_scales"].copy()
    scales[2, 5, 1] = 255
    tensors[f"{DOWN}_scales"] = scales


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{UP}_scales"), f"{UP}_scales is missing"),
        (lambda tensors: tensors.pop(f"{UP}_blocks"), f"{UP}_blocks is missing"),
        (lambda tensors: tensors.update({f"{UP}_scales": tensors[f"{UP}_scales"][:, 1:]}), f"{UP}_scales has shape"),
        (lambda tensors: tensors.update({f"{DOWN}_blocks": tensors[f"{DOWN}_blocks"][..., :8]}), "_blocks has shape"),
        (lambda tensors: tensors.update({f"{DOWN}_scales": tensors[f"{DOWN}_scales"].astype(np.int32)}), "I32"),
        (_nan, f"{DOWN} holds NaN"),
    ],
)
def test_damage_is_named(change: Any, message: str, tmp_path: Path) -> None:
    folder = changed(NAME, tmp_path / "model", change)
    source, config = resolve(str(folder)), model(folder)
    abstract = abstract_params(LaidOutModel(config), np.dtype(np.float32))

    def load() -> None:
        check_tensors(source, config)
        reader = open_weights(source, abstract, quantization=config.quantization)
        build_params(abstract, on_one_device(abstract), reader)

    with pytest.raises(ConfigError, match=message):
        load()
