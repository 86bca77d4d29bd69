"""Every kind of scale of every quantized format at its extremes: refused by name, or the weights are what it says."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from jaxserve.errors import ConfigError
from jaxserve.model_source import read_config, resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import parse_model_config
from jaxserve.params import ParamSpec
from jaxserve.quant import CheckpointQuantization
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.gguf_blocks import BLOCK_KINDS
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.kv_scales import read_kv_scales
from jaxserve.weights.quantized.folder import QuantizedFolder
from jaxserve.weights.quantized.mxfp4 import Mxfp4Folder
from jaxserve.weights.quantized.orbax import OrbaxRows
from jaxserve.weights.quantized.tensors import WEIGHT_SUFFIX
from jaxserve.weights.scales import LARGEST_SCALE, SMALLEST_INPUT_SCALE
from pallas_kernels.quantized_matmul import FACTORS, QuantizedWeight, Scheme
from tests.weights.gguf_converter import write
from tests.weights.quantized.fixtures import MODELS, QUANTIZED
from tests.weights.test_gguf import packed

Array = np.ndarray[Any, Any]
TINY = float(np.finfo(np.float32).tiny)
VALUES = (0.0, 1e-45, 1e-40, TINY, 1e-30, SMALLEST_INPUT_SCALE / 2, 1e-14, 0.1, 1e5, 2 * LARGEST_SCALE, 1e30, np.inf)
KINDS = {"scales", "weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale"}


@functools.cache
def quantization(model: str) -> CheckpointQuantization:
    found = parse_model_config(read_config(resolve(str(QUANTIZED / model)))).quantization
    assert found is not None
    return found


def scale_tensors(*kinds: str) -> list[tuple[str, str]]:
    """Return a tensor of each of these kinds in each format, with its checkpoint."""
    found: dict[tuple[object, str], tuple[str, str]] = {}
    for model in MODELS:
        for name, info in SafetensorsFolder(QUANTIZED / model).infos.items():
            last = name.rpartition(".")[2]
            if "scale" in last and model != "gpt_oss_mxfp4":
                assert last in KINDS, f"{name} of {model} is tested nowhere"
                if last in kinds:
                    format = quantization(model).rules[0].stored, info.stored_type, len(info.shape)
                    found.setdefault((format, last), (model, name))
    return [*found.values()]


class ChangedFolder(SafetensorsFolder):
    """A folder with other values in some tensors."""

    def __init__(self, model: str, changes: dict[str, Array]) -> None:
        super().__init__(QUANTIZED / model)
        self._changes = changes

    def array(self, name: str) -> Array:
        return self._changes[name] if name in self._changes else super().array(name)

    def read(self, name: str, window: Any, out: Array) -> None:
        if name in self._changes:
            out[...] = self._changes[name][window]
        else:
            super().read(name, window, out)


def filled(model: str, name: str, value: float, *, last_only: bool = False) -> Array:
    """Return the tensor of scales with a value in all places, or in the last one of a tensor of ones."""
    stored = SafetensorsFolder(QUANTIZED / model).array(name)
    changed = np.ones(stored.shape, stored.dtype)
    with np.errstate(over="ignore", under="ignore"):
        changed[(-1,) * stored.ndim if last_only else ...] = np.float64(value)
    return changed


def weight_of(model: str, changes: dict[str, Array], module: str) -> tuple[Array, Array]:
    """Return a quantized weight in float32, and its factors."""
    folder = QuantizedFolder(ChangedFolder(model, changes), quantization(model))
    name = f"{module}.weight"
    rows, inputs = folder.infos[name].shape
    out, factors = np.empty((rows, inputs), np.float32), np.empty((rows, 1), FACTORS)
    folder.read(name, (slice(0, rows), slice(0, inputs)), out)
    folder.read_factors(name, (slice(0, rows), slice(inputs - 1, inputs)), 1, factors)
    return out, factors


@pytest.mark.parametrize(("model", "name"), scale_tensors("scales", "weight_scale", "weight_scale_inv"))
def test_scales_of_weights(model: str, name: str) -> None:
    module = name.rpartition(".")[0]
    units, _ = weight_of(model, {name: filled(model, name, 1.0)}, module)
    for value in VALUES:
        scales = filled(model, name, value)
        stored = float(scales.flat[0])
        if TINY <= stored <= LARGEST_SCALE:
            found, factors = weight_of(model, {name: scales}, module)
            np.testing.assert_allclose(found, stored * units.astype(np.float64), atol=2e-5 * stored)
            assert (factors["scale"] == np.float32(stored)).all()
        else:
            message = "NaN or infinity" if np.isinf(stored) else rf"{name} holds the scale"
            with pytest.raises(ConfigError, match=message), np.errstate(invalid="ignore"):
                weight_of(model, {name: scales}, module)


@pytest.mark.parametrize(("model", "name"), scale_tensors("scales", "weight_scale"))
def test_a_scale_of_0_among_others(model: str, name: str) -> None:
    """float16 rounds the scales of tiny weights to 0; other types hold those of all weights but zeros."""
    module = name.rpartition(".")[0]
    scales = filled(model, name, 0.0, last_only=True)
    if scales.dtype == np.float16 and scales.size > 1:
        found, _ = weight_of(model, {name: scales}, module)
        others, _ = weight_of(model, {name: filled(model, name, 1.0)}, module)
        assert found.any()
        assert set(found[found != others]) == {0.0}
    else:
        with pytest.raises(ConfigError, match=f"{name} holds the scale 0; .* or 0 where all numbers are 0"):
            weight_of(model, {name: scales}, module)


@pytest.mark.parametrize(("model", "name"), scale_tensors("scales", "weight_scale", "weight_scale_inv"))
def test_a_weight_of_zeros_may_have_any_scale_near_0(model: str, name: str) -> None:
    module = name.rpartition(".")[0]
    rule = quantization(model).stored(f"{module}.weight") or quantization(model).rules[0].stored
    numbers = f"{module}.{WEIGHT_SUFFIX[rule.packing]}"
    units, _ = weight_of(model, {name: filled(model, name, 1.0)}, module)
    folder = SafetensorsFolder(QUANTIZED / model)
    stored = folder.array(numbers)
    changes = {numbers: np.zeros(stored.shape, stored.dtype)}
    if rule.packing != "plain":
        # Zeros of unsigned numbers are the zero of their group, here 8 or 128 in all places
        each = 0x88888888 if rule.scheme is not None and rule.scheme.bits == 4 else 0x80808080
        changes[numbers].view(np.uint32)[...] = each
        less = 0x11111111 if each == 0x88888888 else 0x01010101
        for last, zero in (("qzeros", each - less if rule.packing == "gptq" else each), ("weight_zero_point", each)):
            if f"{module}.{last}" in folder.infos:
                changes[f"{module}.{last}"] = np.full_like(folder.array(f"{module}.{last}").view(np.uint32), zero)
                changes[f"{module}.{last}"] = changes[f"{module}.{last}"].view(np.int32)
    assert units.any()
    for value in (0.0, 1e-40):
        found, _ = weight_of(model, changes | {name: filled(model, name, value)}, module)
        assert not found.any()


@pytest.mark.parametrize(("model", "name"), scale_tensors("input_scale"))
def test_scales_of_inputs(model: str, name: str) -> None:
    weight = f"{name.rpartition('.')[0]}.weight"
    for value in VALUES:
        scales = filled(model, name, value)
        folder = QuantizedFolder(ChangedFolder(model, {name: scales}), quantization(model))
        problem = folder.infos[weight].unreadable
        if SMALLEST_INPUT_SCALE <= float(scales.flat[0]) <= LARGEST_SCALE:
            assert not problem
            assert folder.read_input_scale(weight) == float(scales.flat[0])
        else:
            assert problem == f"{name} must be from 1e-15 to 1e+06, it is {float(scales.flat[0]):g}"


@pytest.mark.parametrize(("model", "name"), scale_tensors("k_scale", "v_scale"))
def test_scales_of_keys_and_values(model: str, name: str) -> None:
    laid_out = LaidOutModel(parse_model_config(read_config(resolve(str(QUANTIZED / model)))))
    for value in VALUES:
        scales = filled(model, name, value)
        folder = ChangedFolder(model, {name: scales})
        if SMALLEST_INPUT_SCALE <= float(scales.flat[0]) <= LARGEST_SCALE:
            found = read_kv_scales(folder, laid_out)
            assert found is not None
            assert np.float32(scales.flat[0]) in found.by_group[0]
        else:
            with pytest.raises(ConfigError, match=rf"{name} must be from 1e-15 to 1e\+06, got"):
                read_kv_scales(folder, laid_out)


@pytest.mark.parametrize("exponent", [0, 1, 100, 127 + 19, 127 + 20, 254])
def test_powers_of_two_of_mxfp4(exponent: int, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = (
        SafetensorsFolder(QUANTIZED / "gpt_oss_mxfp4").array(f"{name}_{last}") for last in ("blocks", "scales")
    )
    raw = packed(Kind.MXFP4, (2, 64), np.random.default_rng(0))
    raw.reshape(-1, 17)[:, 0] = exponent

    def read(zeros: bool) -> Array:
        """Return the weights that the folder has, and check that a GGUF file's are what the gguf package says."""
        changes = {f"{name}_scales": np.full_like(scales, exponent)}
        numbers = raw.copy()
        if zeros:
            changes[f"{name}_blocks"] = np.full_like(blocks, 0x80)
            numbers.reshape(-1, 17)[:, 1:] = 0x08
        file = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (numbers, Kind.MXFP4)}))
        found = np.empty((2, 64), np.float32)
        with pytest.raises(ConfigError) if refused and not zeros else np.errstate():
            file.read("lm_head.weight", (slice(0, 2), slice(0, 64)), found)
            np.testing.assert_array_equal(found, dequantize(numbers, Kind.MXFP4))
        folder = Mxfp4Folder(ChangedFolder("gpt_oss_mxfp4", changes), quantization("gpt_oss_mxfp4"))
        out = np.empty(folder.infos[name].shape, np.float32)
        folder.read(name, tuple(slice(0, size) for size in out.shape), out)
        return out

    refused = exponent == 0 or exponent > 127 + 19
    if refused:
        with pytest.raises(ConfigError, match=f"{name}_scales holds the scale"):
            read(zeros=False)
    else:
        assert read(zeros=False).max() == 6 * 2.0 ** (exponent - 127)
    if exponent == 0:
        assert not read(zeros=True).any()


@pytest.mark.parametrize("kind", sorted(BLOCK_KINDS.keys() - {Kind.MXFP4}), ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [0.0, 6e-8, 65504.0, -65504.0, np.inf])
def test_scales_of_gguf(kind: Kind, value: float, tmp_path: Path) -> None:
    """A block of zeros has the scale 0, and so has one of numbers that float16 rounds to 0."""
    raw = packed(kind, (2, 512), np.random.default_rng(0))
    size = GGML_QUANT_SIZES[kind][1]
    at = 208 if kind == Kind.Q6_K else 0
    raw.reshape(-1, size)[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    source = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (raw, kind)}))
    found, factors = np.empty((2, 512), np.float32), np.empty((2, 512 // 16), FACTORS)
    largest = 127 * abs(value) if kind == Kind.Q6_K else 63 * abs(value) if kind in (Kind.Q4_K, Kind.Q5_K) else value
    whole, units = (slice(0, 2), slice(0, 512)), (slice(0, 2), slice(0, 32))
    if np.isfinite(value):
        source.read("lm_head.weight", whole, found)
        np.testing.assert_array_equal(found, dequantize(raw, kind))
    if largest > LARGEST_SCALE:
        message = r"lm_head\.weight holds (the scale|NaN or infinity)"
        with pytest.raises(ConfigError, match=message), np.errstate(invalid="ignore"):
            source.read_factors("lm_head.weight", units, 16, factors)
        return
    source.read_factors("lm_head.weight", units, 16, factors)
    assert np.isfinite(factors["scale"]).all()
    assert np.isfinite(factors["minimum"]).all()


@pytest.mark.parametrize("numbers", ["int4", "int8", "fp8"])
def test_scales_of_converted_folders(numbers: Any) -> None:
    scheme = Scheme(numbers, 32)
    spec = ParamSpec((4, 2), np.dtype(np.float32), (None, None))
    weight = QuantizedWeight(ParamSpec((4, 64), np.dtype(np.uint8), (None, None)), spec, None, None, None, scheme)
    for value in VALUES[:-1]:
        rows = OrbaxRows({("w",): weight}, lambda path, spec, window, out: out.fill(value), "the folder")  # noqa: B023
        factors = np.empty((4, 2), FACTORS)
        window = slice(0, 4), slice(0, 2)
        if TINY <= value <= LARGEST_SCALE:
            rows.factors(("w",), window, 32, factors)
            assert (factors["scale"] == np.float32(value)).all()
        else:
            with pytest.raises(ConfigError, match=r"the folder: w\.scale holds the scale"):
                rows.factors(("w",), window, 32, factors)
