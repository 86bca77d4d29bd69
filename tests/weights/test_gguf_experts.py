"""Experts in GGUF files: parts of the tensors that they share, in every type, by any names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.numpy import save_file

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource, read_config, resolve
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import Window, dotted
from jaxserve.quant import GGUF_TYPES, WeightChoice, choose_weights, hold_weights
from jaxserve.weights import build_params, check_tensors, open_weights, stored_types
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.gguf_blocks import BLOCK_KINDS
from pallas_kernels.quantized_matmul import FACTORS, FP4_VALUES, unpack
from pallas_kernels.target import CPU
from tests.models.forward import prompt_logits
from tests.weights.conftest import GOLDEN, assert_same_params, load_model, on_one_device, random_checkpoint
from tests.weights.gguf_converter import Tensors, from_golden, write
from tests.weights.test_gguf import packed

EXPERTS, ROWS, INPUTS = 3, 24, 512
WINDOWS: tuple[Window, ...] = (
    (slice(0, EXPERTS), slice(0, 2 * ROWS), slice(0, INPUTS)),
    (slice(1, 3), slice(5, 6), slice(256, 512)),
    (slice(2, 3), slice(4, 31), slice(32, 320)),
)
BF16 = np.dtype(jnp.bfloat16)
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
"""Blocks of 32 divide all inputs of these sizes, except in a shared expert's down projection."""


def gguf(path: Path) -> ModelSource:
    return ModelSource(path, "gguf", "m")


def quantized(source: GGUFFile, name: str, window: Window, unit: int) -> np.ndarray[Any, Any]:
    """Return what the numbers and factors of a window stand for."""
    *outer, width = [part.stop - part.start for part in window]
    numbers, factors = np.empty((*outer, width), np.uint8), np.empty((*outer, width // unit), FACTORS)
    source.read_numbers(name, window, numbers)
    source.read_factors(name, (*window[:-1], slice(window[-1].start // unit, window[-1].stop // unit)), unit, factors)
    is_float = source.infos[name].stored_type == "MXFP4"
    grouped = (FP4_VALUES[numbers] if is_float else numbers.astype(np.float32)).reshape(*factors.shape, unit)
    return (grouped * factors["scale"][..., None] + factors["minimum"][..., None]).reshape(*outer, width)


def read(source: GGUFFile, name: str, window: Window) -> np.ndarray[Any, Any]:
    out = np.full([part.stop - part.start for part in window], np.nan, np.float32)
    source.read(name, window, out)
    return out


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_any_window_is_what_the_blocks_stand_for(kind: Kind, tmp_path: Path, rng: np.random.Generator) -> None:
    """gpt-oss' gate and up have rows by turns; an expert of Qwen3's is a matrix of its own."""
    raw = {part: packed(kind, (EXPERTS * ROWS, INPUTS), rng).reshape(EXPERTS, ROWS, -1) for part in ("gate", "up")}
    tensors: Tensors = {f"blk.0.ffn_{part}_exps.weight": (raw[part], kind) for part in ("up", "gate")}
    gate, up = (dequantize(raw[part], kind) for part in ("gate", "up"))
    close = {"rtol": 1e-6, "atol": 1e-5 * np.abs(up).max()}
    together = GGUFFile(write(tmp_path / "oss.gguf", tensors, "gpt-oss"))
    name, unit = "model.layers.0.mlp.experts.gate_up_proj", BLOCK_KINDS[kind].group
    whole = np.stack([gate, up], axis=2).reshape(EXPERTS, 2 * ROWS, INPUTS)
    assert together.infos[name].shape == whole.shape
    for window in WINDOWS:
        np.testing.assert_array_equal(read(together, name, window), whole[window])
        np.testing.assert_allclose(quantized(together, name, window, unit), whole[window], **close)
    apart = GGUFFile(write(tmp_path / "qwen.gguf", tensors, "qwen3moe"))
    name, inner = "model.layers.0.mlp.experts.2.up_proj.weight", (slice(3, 17), slice(32, 320))
    assert len(apart.infos) == 2 * EXPERTS
    np.testing.assert_array_equal(read(apart, name, inner), up[2][inner])
    np.testing.assert_allclose(quantized(apart, name, inner, unit), up[2][inner], **close)


def random_model(name: str, folder: Path, **sizes: int) -> Path:
    """Write a model with a fixture's config but for some sizes, and random weights."""
    raw = json.loads((GOLDEN / name / "config.json").read_text()) | {"num_hidden_layers": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(raw | sizes))
    config = parse_model_config(raw | sizes)
    weights = random_checkpoint(abstract_params(LaidOutModel(config), np.dtype(np.float32)))
    small = {key: data * np.float32(0.1 if data.ndim > 1 else 1) for key, data in weights.items()}
    save_file(small, folder / "model.safetensors")
    return folder


def held(source: ModelSource) -> tuple[WeightChoice, Any, Any]:
    """Load a model as a CPU holds it; return the choice, the specs and the parameters."""
    config = parse_model_config(read_config(source))
    abstract = abstract_params(LaidOutModel(config), BF16)
    made = choose_weights("auto", abstract, stored_types(source, config), "gguf", target=CPU, dtype=BF16)
    tree = hold_weights(abstract, made.forms)
    return made, tree, build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.MXFP4], ids=lambda kind: kind.name)
def test_experts_are_held_as_they_are_stored(kind: Kind, tmp_path: Path) -> None:
    source = gguf(from_golden(random_model("qwen2_moe", tmp_path, **WIDE), tmp_path / "m.gguf", kind))
    made, _, params = held(source)
    found = {dotted(path): scheme for path, scheme in made.quantized.items()}
    experts = "layers.0.mlp.experts"
    assert found[f"{experts}.up"] == found[f"{experts}.down"] == GGUF_TYPES[kind.name].scheme
    assert "layers.0.mlp.shared.down, layers.0.mlp.shared_gate: stored as F32" in made.reasons
    packed, dense = (one.layers[0].mlp.experts for one in (params, load_model(source)))
    np.testing.assert_array_equal(unpack(packed.up), dense.up)
    np.testing.assert_array_equal(unpack(packed.down), dense.down)


@pytest.mark.slow  # a CPU's kernels are compiled for each type
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_dequantized_model(kind: Kind, tmp_path: Path) -> None:
    source = gguf(from_golden(random_model("qwen2_moe", tmp_path, **WIDE), tmp_path / "m.gguf", kind))
    _, tree, params = held(source)
    config, ids = parse_model_config(read_config(source)), list(range(40))
    logits = prompt_logits(LaidOutModel(config), params, ids, size=64, abstract=tree)
    expected = prompt_logits(LaidOutModel(config), load_model(source), ids, size=64)
    assert np.sqrt(((logits - expected) ** 2).mean()) < 0.06 * expected.std()


def test_experts_that_no_kernel_takes_are_dequantized_and_named(tmp_path: Path) -> None:
    """Six bits have a scale for 16 inputs, and a CPU's kernel one for 32."""
    config = parse_model_config(read_config(resolve(str(GOLDEN / "qwen3_moe"))) | {"moe_intermediate_size": 32})
    abstract = abstract_params(LaidOutModel(config), BF16)
    types = {"down": "Q6_K", "gate": "Q8_0", "up": "Q8_0"}
    stored = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": GGUF_TYPES[kind]
        for layer in range(2)
        for expert in range(8)
        for part, kind in types.items()
    }
    made = choose_weights("auto", abstract, stored, "gguf", target=CPU, dtype=BF16)
    assert {dotted(path) for path in made.quantized} == {f"layers.{i}.mlp.experts.up" for i in range(2)}
    assert "layers.0.mlp.experts.down, layers.1.mlp.experts.down: the CPU's kernel needs" in made.reasons


def test_the_first_files_of_mixtral_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    def split(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_exps." in name]:
            experts, kind = tensors.pop(name)
            tensors |= {name.replace("_exps.", f".{i}."): (each, kind) for i, each in enumerate(experts)}

    path = from_golden("mixtral", tmp_path / "m.gguf", change=split)
    assert "blk.1.ffn_down.5.weight" in GGUFMetadata(path).tensors
    assert_same_params(load_model(gguf(path)), load_model(resolve(str(GOLDEN / "mixtral"))))


def test_the_gate_of_a_shared_expert_may_have_lost_a_dimension(tmp_path: Path) -> None:
    """llama-quantize writes one row of numbers as a vector."""

    def flat(tensors: Tensors) -> None:
        row, kind = tensors["blk.0.ffn_gate_inp_shexp.weight"]
        tensors["blk.0.ffn_gate_inp_shexp.weight"] = row.ravel(), kind

    folder = random_model("qwen2_moe", tmp_path)
    path = from_golden(folder, tmp_path / "m.gguf", change=flat)
    assert GGUFFile(path).infos["model.layers.0.mlp.shared_expert_gate.weight"].shape == (32,)
    assert_same_params(load_model(gguf(path)), load_model(resolve(str(folder))))


def test_layers_that_draft_are_ignored(tmp_path: Path) -> None:
    more = {
        "nextn.eh_proj": (32, 64),
        "nextn.enorm": (32,),
        "nextn.hnorm": (32,),
        "nextn.embed_tokens": (128, 32),
        "nextn.shared_head_head": (128, 32),
        "nextn.shared_head_norm": (32,),
        "attn_norm": (32,),
        "attn_q": (64, 32),
        "ffn_gate_inp": (8, 32),
        "ffn_up_exps": (8, 24, 32),
    }
    extra = {f"blk.3.{name}.weight": np.ones(shape, np.float32) for name, shape in more.items()}
    extra["blk.3.exp_probs_b.bias"] = np.ones(8, np.float32)
    source = gguf(from_golden("glm4_moe", tmp_path / "m.gguf", extra=extra))
    assert (read_config(source)["num_hidden_layers"], read_config(source)["num_nextn_predict_layers"]) == (3, 1)
    assert_same_params(load_model(source), load_model(resolve(str(GOLDEN / "glm4_moe"))))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gpt_oss",
            ("blk.0.ffn_up_exps.weight", lambda data: data[:, 1:]),
            r"ffn_up_exps.weight \[6, 23, 32\] have no",
        ),
        ("gpt_oss", ("blk.0.ffn_up_exps.bias", lambda data: data[0]), "have no rows that could alternate"),
        ("mixtral", ("blk.0.ffn_up_exps.weight", lambda data: data[1:]), r"layers\.0.*experts\.5\.w3\.weight"),
        ("mixtral", ("blk.0.ffn_up_exps.weight", lambda data: data[0, 0]), r"w3\.weight \(it has 0 dimensions"),
        ("olmoe", ("blk.1.ffn_gate_exps.weight", lambda data: data.swapaxes(1, 2)), r"gate_proj\.weight \[32, 24\]"),
    ],
)
def test_damage_is_named(name: str, change: Any, message: str, tmp_path: Path) -> None:
    tensor, damage = change
    path = from_golden(
        name, tmp_path / "m.gguf", change=lambda all: all.update({tensor: (damage(all[tensor][0]), None)})
    )
    source = gguf(path)
    with pytest.raises(ConfigError, match=message):
        check_tensors(source, parse_model_config(read_config(source)))


def test_experts_in_a_type_that_is_not_read_are_refused_by_name(tmp_path: Path) -> None:
    raw = np.zeros((2, 4, 82), np.uint8)
    source = GGUFFile(write(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (raw, Kind.IQ2_S)}, "qwen3moe"))
    assert source.infos["model.layers.0.mlp.experts.1.up_proj.weight"].unreadable.startswith("type IQ2_S is not")


def test_nan_of_mxfp4_is_an_error(tmp_path: Path) -> None:
    raw = np.zeros((2, 4, 17), np.uint8)
    raw[1, 2, 0] = 255
    source = GGUFFile(write(tmp_path / "m.gguf", {"blk.0.ffn_up_exps.weight": (raw, Kind.MXFP4)}, "qwen3moe"))
    factors = np.empty((4, 1), FACTORS)
    source.read_factors("model.layers.0.mlp.experts.0.up_proj.weight", (slice(0, 4), slice(0, 1)), 32, factors)
    with pytest.raises(ConfigError, match=r"experts\.1\.up_proj"):
        source.read_factors("model.layers.0.mlp.experts.1.up_proj.weight", (slice(0, 4), slice(0, 1)), 32, factors)
