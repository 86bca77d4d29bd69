from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.source import BLOCK_ELEMENTS
from tests.weights.conftest import GOLDEN, assert_same_params, load_model
from tests.weights.gguf_converter import from_golden, permuted, write

# The byte offsets of a block's float16 scales, for the types that the gguf package can't quantize to
SCALES = {Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208]}


def packed(kind: Kind, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return a tensor as the bytes that the file holds."""
    if kind not in SCALES:
        quantized: np.ndarray[Any, Any] = quantize(rng.standard_normal(shape, dtype=np.float32), kind)
        return quantized
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = rng.uniform(0.01, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def read(source: GGUFFile, name: str) -> np.ndarray[Any, Any]:
    out = np.full(source.infos[name].shape, np.nan, np.float32)
    source.read(name, tuple(slice(0, length) for length in out.shape), out)
    return out


@pytest.mark.parametrize(
    "kind",
    [
        Kind.F32,
        Kind.F16,
        Kind.BF16,
        Kind.Q4_0,
        Kind.Q4_1,
        Kind.Q5_0,
        Kind.Q5_1,
        Kind.Q8_0,
        Kind.Q4_K,
        Kind.Q5_K,
        Kind.Q6_K,
    ],
    ids=lambda kind: kind.name,
)
def test_every_type_gives_the_values_of_the_gguf_package(tmp_path: Path, rng: np.random.Generator, kind: Kind) -> None:
    rows = BLOCK_ELEMENTS // 512 + 9  # more than one block
    first, second = packed(kind, (3, 512), rng), packed(kind, (rows, 512), rng)
    source = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (first, kind), "token_embd.weight": (second, kind)}))
    assert source.infos["lm_head.weight"].shape == (3, 512)
    assert source.infos["model.embed_tokens.weight"].stored_type == kind.name
    expected = dequantize(second, kind)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    np.testing.assert_array_equal(read(source, "lm_head.weight"), dequantize(first, kind))
    np.testing.assert_array_equal(read(source, "model.embed_tokens.weight"), expected)
    part = np.empty((4, 512), np.float32)
    source.read("model.embed_tokens.weight", (slice(5, 9), slice(0, 512)), part)
    np.testing.assert_array_equal(part, expected[5:9])
    for columns in (slice(0, 256), slice(31, 290), slice(500, 512)):  # one or several blocks, whole or in part
        part = np.empty((rows - 2, columns.stop - columns.start), np.float32)
        source.read("model.embed_tokens.weight", (slice(2, rows), columns), part)
        np.testing.assert_array_equal(part, expected[2:, columns])


@pytest.mark.parametrize("kind", [Kind.IQ4_NL, Kind.Q2_K, Kind.TQ1_0], ids=lambda kind: kind.name)
def test_other_types_are_refused_by_name(tmp_path: Path, kind: Kind) -> None:
    raw = np.zeros((2, GGML_QUANT_SIZES[kind][1]), np.uint8)
    info = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (raw, kind)})).infos["lm_head.weight"]
    assert kind.name in info.unreadable
    assert "Q4_K" in info.unreadable


@pytest.mark.parametrize("name", ["llama2", "smollm2", "llama_head_dim", "qwen2", "qwen3"])
def test_a_model_converted_to_gguf_has_the_parameters_it_had(tmp_path: Path, name: str) -> None:
    path = from_golden(name, tmp_path / "m.gguf")
    assert_same_params(
        load_model(ModelSource(path, "gguf", name)), load_model(ModelSource(GOLDEN / name, "folder", name))
    )


def test_rows_of_quantized_q_and_k_are_restored(tmp_path: Path) -> None:
    """Each row is quantized by itself, so reordering rows and quantizing them commute."""
    source = GGUFFile(from_golden("smollm2", tmp_path / "m.gguf", Kind.Q8_0))
    weights = load_file(GOLDEN / "smollm2" / "model.safetensors")
    for part in ("q", "k", "v", "o"):
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert source.infos[name].stored_type == "Q8_0"
        np.testing.assert_array_equal(read(source, name), dequantize(quantize(weights[name], Kind.Q8_0), Kind.Q8_0))


def test_biases_of_a_llama_are_restored_too(tmp_path: Path, rng: np.random.Generator) -> None:
    bias = rng.standard_normal(24).astype(np.float32)
    tensors = {
        "blk.0.attn_q.bias": (permuted(bias, 3), None),
        "blk.0.attn_k.bias": (permuted(bias[:8], 1), None),
        "blk.0.attn_v.bias": (bias[:8], None),
    }
    heads = {"attention__head_count": [3, 3], "attention__head_count_kv": [1, 1]}
    source = GGUFFile(write(tmp_path / "m.gguf", tensors, "llama", **heads))
    for part, size in (("q", 24), ("k", 8), ("v", 8)):
        np.testing.assert_array_equal(read(source, f"model.layers.0.self_attn.{part}_proj.bias"), bias[:size])


def test_scaled_frequencies_are_not_a_weight_and_unknown_names_are_kept(tmp_path: Path) -> None:
    vector = (np.ones(8, np.float32), None)
    names = ["rope_freqs.weight", "blk.0.ssm_a.weight", "blk.0.attn_sinks.weight", "cls.weight", "odd"]
    source = GGUFFile(write(tmp_path / "m.gguf", dict.fromkeys(names, vector)))
    assert list(source.infos) == names[1:]


def test_a_left_over_tensor_of_a_gguf_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = from_golden("llama2", tmp_path / "m.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ConfigError, match=r"1 tensor is left over .*: blk\.0\.attn_sinks\.weight"):
        load_model(ModelSource(path, "gguf", "m"))
