"""Decoded GGUF blocks, compared with the gguf package's own dequantization; packed weights made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from jaxserve.model_source import ModelSource, read_config
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import ParamSpec, TensorPart, dotted
from jaxserve.quant import GGUF_TYPES, HEAD, StoredWeight, WeightForm, choose_weights, hold_weights
from jaxserve.weights import WeightReader, build_params, open_weights, stored_types
from jaxserve.weights.arrays import flatten
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.gguf_blocks import BLOCK_KINDS
from jaxserve.weights.load import checkpoint_reader
from jaxserve.weights.quantized.rows import row_windows
from jaxserve.weights.source import BLOCK_ELEMENTS
from pallas_kernels.quantized_matmul import FACTORS, FP4_VALUES, STRIP, Backend, PackedWeight, Scheme, unpack
from pallas_kernels.quantized_matmul import dequantize as rows_dequantized
from pallas_kernels.target import CPU
from tests.weights.conftest import GOLDEN, MemorySource, assert_same_params, load_model, on_one_device
from tests.weights.gguf_converter import from_golden, permuted, write
from tests.weights.test_gguf import packed

KINDS = sorted(BLOCK_KINDS, key=lambda kind: kind.name)
HEAD_PARTS = (TensorPart("lm_head.weight", (48, 512), (0, 0)),)
HEADS = {"attention__head_count": 4, "attention__head_count_kv": 2}
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def values(source: GGUFFile, rows: slice, columns: slice, group: int) -> np.ndarray[Any, Any]:
    """Return the weights that numbers and factors represent, read into every second row of larger arrays."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    numbers = np.zeros((2 * height, width + 3), np.uint8)[::2, 1 : 1 + width]
    factors = np.zeros((2 * height, width // group + 3), FACTORS)[::2, 1 : 1 + width // group]
    source.read_numbers("lm_head.weight", (rows, columns), numbers)
    units = slice(columns.start // group, columns.stop // group)
    source.read_factors("lm_head.weight", (rows, units), group, factors)
    is_float = source.infos["lm_head.weight"].stored_type == "MXFP4"
    grouped = (FP4_VALUES[numbers] if is_float else numbers.astype(np.float32)).reshape(height, -1, group)
    whole: np.ndarray[Any, Any] = factors["scale"][..., None] * grouped + factors["minimum"][..., None]
    return whole.reshape(height, width)


def filled(reader: WeightReader, abstract: Any) -> list[np.ndarray[Any, Any]]:
    """Return the leaves of a tree, filled by a reader."""
    made = []
    for path, spec in flatten(abstract)[0]:
        made.append(np.zeros(spec.shape, spec.dtype))
        reader.fill(path, spec, tuple(slice(0, length) for length in spec.shape), made[-1])
    return made


def loaded(source: Any, spec: ParamSpec, scheme: Scheme | None = None) -> PackedWeight:
    """Load one weight, packed."""
    abstract = hold_weights({"w": spec}, {("w",): WeightForm(scheme)})
    reader = checkpoint_reader(abstract, source, {"w": spec}, quantized=None if scheme is None else source)
    weight: PackedWeight = jax.tree.unflatten(flatten(abstract)[1], filled(reader, abstract))["w"]
    return weight


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_gives_the_values_of_the_gguf_package(kind: Kind, tmp_path: Path, rng: np.random.Generator) -> None:
    raw = packed(kind, (48, 512), rng)
    raw[0] = 255 if kind in (Kind.Q4_K, Kind.Q5_K) else raw[0]
    if kind in (Kind.Q4_K, Kind.Q5_K):  # the largest 6-bit scales; float16 scales that are not NaN
        raw[0].reshape(2, -1)[:, :4] = np.array([0.5, 0.25], np.float16).view(np.uint8)
    source = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (raw, kind)}))
    exact = dequantize(raw, kind)
    # A K type's scale has up to 18 bits, and with an 8-bit number more than float32 holds
    exactly = {"rtol": 0, "atol": 2e-7 * np.abs(exact).max() * 128 if kind == Kind.Q6_K else 0}
    group = BLOCK_KINDS[kind].group
    np.testing.assert_allclose(values(source, slice(0, 48), slice(0, 512), group), exact, **exactly)
    for rows, columns in (((3, 17), (0, 512)), ((39, 40), (224, 256)), ((8, 16), (160, 480)), ((0, 1), (480, 512))):
        window = slice(*rows), slice(*columns)
        np.testing.assert_allclose(values(source, *window, group), exact[window], **exactly)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_of_every_type_are_the_values_of_the_gguf_package(
    kind: Kind, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Other devices than a CPU hold no minimum: without zeros, the middle of the numbers must be 0."""
    raw = packed(kind, (48, 512), rng)
    source = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (raw, kind)}))
    dense = {"w": ParamSpec((48, 512), np.dtype(jnp.bfloat16), (None, None), inputs=1, parts=HEAD_PARTS)}
    stored = GGUF_TYPES[kind.name]
    form = WeightForm(stored.scheme, stored.factors, stored.zeros, backend=Backend())
    abstract = hold_weights(dense, {("w",): form})
    reader = checkpoint_reader(abstract, source, dense, quantized=source)
    weight = jax.tree.unflatten(flatten(abstract)[1], filled(reader, abstract))["w"]
    exact = dequantize(raw, kind)
    np.testing.assert_allclose(rows_dequantized(weight), exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_every_type_that_is_held_quantized_is_decoded() -> None:
    assert GGUF_TYPES.keys() == {kind.name for kind in BLOCK_KINDS}


def test_factors_of_parts_of_a_group_are_those_of_the_group(tmp_path: Path, rng: np.random.Generator) -> None:
    raw = packed(Kind.Q4_1, (16, 64), rng)
    source = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (raw, Kind.Q4_1)}))
    window = slice(0, 16), slice(32, 64)
    np.testing.assert_array_equal(values(source, *window, 16), dequantize(raw, Kind.Q4_1)[window])


def test_q_k_and_v_of_mixed_types_become_one_weight_of_the_widest(tmp_path: Path, rng: np.random.Generator) -> None:
    """Two KV heads of two queries each: rows of q and k get Hugging Face's order, interleaved with those of v."""
    kinds, rows = {"q": Kind.Q4_1, "k": Kind.Q4_0, "v": Kind.Q8_0}, {"q": 128, "k": 64, "v": 64}
    stored, whole = {}, {}
    for part, kind in kinds.items():
        raw = packed(kind, (rows[part], 64), rng)
        whole[part] = dequantize(raw, kind)
        heads = {"q": 4, "k": 2}.get(part)
        stored[f"blk.0.attn_{part}.weight"] = (raw if heads is None else permuted(raw, heads), kind)
    source = GGUFFile(write(tmp_path / "m.gguf", stored, "llama", **HEADS))
    places = [
        TensorPart(name, (2, members, 32, 64), (0, start, 0, 0))
        for name, members, start in ((Q, 2, 0), (K, 1, 2), (V, 1, 3))
    ]
    spec = ParamSpec((2, 4, 32, 64), np.dtype(jnp.bfloat16), (None,) * 4, inputs=1, parts=tuple(places))
    qkv = loaded(source, spec, Scheme("int8", 32, zeros=True))
    parts = [whole["q"].reshape(2, 2, 32, 64), whole["k"].reshape(2, 1, 32, 64), whole["v"].reshape(2, 1, 32, 64)]
    np.testing.assert_array_equal(unpack(qkv), np.concatenate(parts, axis=1))


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [
        ((2, 24, 64), 1),  # neither half is a whole number of strips
        ((512, 3, 2, 64), 3),  # several input dimensions, and several windows
        ((1, 2048, 256), 1),
    ],
)
def test_windows_cover_the_whole_weight(
    shape: tuple[int, ...], inputs: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    split = len(shape) - inputs
    raw = packed(Kind.Q4_1, (int(np.prod(shape[:split])), int(np.prod(shape[split:]))), rng)
    source = GGUFFile(write(tmp_path / "m.gguf", {"output.weight": (raw, Kind.Q4_1)}))
    parts = (TensorPart("lm_head.weight", shape, (0,) * len(shape)),)
    spec = ParamSpec(shape, np.dtype(jnp.bfloat16), (None,) * len(shape), inputs=inputs, parts=parts)
    weight = loaded(source, spec, Scheme("int4", 32, zeros=True))
    exact = dequantize(raw, Kind.Q4_1).reshape(*shape[:split], -1)
    np.testing.assert_array_equal(unpack(weight), exact)


def test_windows_are_whole_strips_and_no_larger_than_necessary() -> None:
    for shape, most in (((49152,), 227), ((2, 1536), 227), ((3, 5, 64), 227), ((5, 48), 7), ((2, 24), 1), ((16,), 0)):
        sizes = [
            np.prod([part.stop - part.start for part in window])
            for window, _ in row_windows(tuple(slice(0, n) for n in shape), most, STRIP)
        ]
        assert sum(sizes) == np.prod(shape)
        assert all(size % STRIP == 0 for size in sizes)
        assert max(sizes) <= max(most, 3 * STRIP), (shape, sizes)


def test_dense_weights_are_packed_in_16_bits(rng: np.random.Generator) -> None:
    shape = (2, 1024, 96)
    dense = rng.standard_normal((2048, 96)).astype(jnp.bfloat16)
    assert dense.size > BLOCK_ELEMENTS
    source = MemorySource({"w": dense})
    spec = ParamSpec(shape, dense.dtype, (None,) * 3, inputs=1, parts=(TensorPart("w", shape, (0, 0, 0)),))
    weight = loaded(source, spec)
    np.testing.assert_array_equal(unpack(weight), dense.astype(np.float32).reshape(shape))
    assert source.elements_read == {"w": dense.size}


@pytest.mark.parametrize("name", ["smollm2", "llama2"])
def test_a_model_keeps_its_weights_when_they_are_packed(name: str, tmp_path: Path) -> None:
    """In these small models the down projections, which have 48 inputs, are dequantized: they have no whole blocks.

    smollm2's head is tied to its embedding.
    """
    source = ModelSource(from_golden(name, tmp_path / "m.gguf", Kind.Q8_0), "gguf", name)
    config = parse_model_config(read_config(source))
    abstract = abstract_params(LaidOutModel(config), np.dtype(jnp.bfloat16))
    stored = stored_types(source, config)
    made = choose_weights("auto", abstract, stored, "gguf", target=CPU, dtype=np.dtype(jnp.bfloat16))
    assert {dotted(path).rpartition(".")[2] for path in made.quantized} == {"qkv", "up", "output"}
    assert made.quantized[HEAD] == Scheme("int8", 32)
    tree = hold_weights(abstract, made.forms)
    params = build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract))
    dense = load_model(source, jnp.bfloat16)
    exact = load_model(source)
    assert_same_params(params.embedding, dense.embedding)
    head = exact.embedding if exact.output is None else exact.output
    np.testing.assert_array_equal(unpack(params.output), head)
    for layer, same, precise in zip(params.layers, dense.layers, exact.layers):
        np.testing.assert_array_equal(unpack(layer.mlp.up), precise.mlp.up)
        np.testing.assert_array_equal(unpack(layer.attention.qkv), precise.attention.qkv)
        assert_same_params(layer.mlp.down, same.mlp.down)
        exactly = precise.attention.output.reshape(layer.attention.output.shape)
        np.testing.assert_array_equal(unpack(layer.attention.output), exactly)


def test_stored_types_are_those_of_the_file(tmp_path: Path) -> None:
    source = ModelSource(from_golden("smollm2", tmp_path / "m.gguf", Kind.Q8_0), "gguf", "m")
    config = parse_model_config(read_config(source))
    types = stored_types(source, config)
    assert types["model.norm.weight"] == StoredWeight("F32")
    assert types["model.embed_tokens.weight"] == GGUF_TYPES["Q8_0"]
    assert stored_types(source, config, "dummy") == {}
    assert stored_types(ModelSource(GOLDEN / "smollm2", "folder", "m"), config) == {}
