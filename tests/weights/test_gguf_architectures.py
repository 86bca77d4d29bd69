"""Each architecture of GGUF files: what is read is the model that the file was made from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from jaxserve.errors import ConfigError
from jaxserve.layers.delta_net import DeltaNetParams
from jaxserve.layers.rope import RopeConfig, frequencies
from jaxserve.model_source import ModelSource, read_config
from jaxserve.model_source.gguf_architectures import ARCHITECTURES
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.models.config import ModelConfig
from jaxserve.models.draft_heads import mtp
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import dotted
from jaxserve.quant import GGUF_TYPES, choose_weights, hold_weights
from jaxserve.weights import build_params, open_weights, stored_types
from pallas_kernels.grouped_matmul import Gate
from pallas_kernels.quantized_matmul import unpack
from pallas_kernels.target import CPU
from tests.models.golden import golden_config
from tests.weights.conftest import GOLDEN, assert_same_params, load_model, on_one_device
from tests.weights.gguf_converter import from_golden

# What a file doesn't tell of the fixture: llama.cpp has no key for it, and every released model has the same
UNTOLD: dict[str, dict[str, Any]] = {
    "gemma2": {"attention_scale": 16**-0.5},
    "gemma3": {"attention_scale": 16**-0.5},
    "granite4": {"architecture": "GraniteForCausalLM", "shared_mlp": False},
    "starcoder2": {"windows": (4096, 4096)},
    "olmoe": {"norm_eps": 1e-5},
    "gpt_oss": {"gate": Gate(slope=1.702, limit=7.0, up_offset=1.0)},
    # The projections of Qwen3-Next are stored as those of Qwen3.5, and the layer that drafts is left out
    "qwen3_next": {
        "architecture": "Qwen3_5MoeForCausalLM",
        "names": golden_config("qwen3_5_moe").names,
        "draft_layers": 0,
    },
    "qwen3_5_moe": {"intermediate_size": 1},
}
FIXTURES = (
    "llama2", "llama3", "smollm2", "llama_head_dim", "llama_linear", "llama_yarn", "mistral", "qwen2", "qwen3",
    "gemma2", "gemma3", "phi3", "olmo2", "olmo3", "granite", "granite4", "smollm3", "glm4", "cohere2", "starcoder2",
    "ministral3", "exaone4", "seed_oss", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe",
    "minimax_m2", "deepseek_v3", "deepseek_v2_lite", "qwen3_next", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip


def folder_of(name: str, tmp_path: Path) -> Path:
    """Return the folder of a fixture; a copy without its dense layer, which llama.cpp has no key for, if it has one."""
    if name not in ("qwen2_moe", "qwen3_next"):
        return GOLDEN / name
    config = json.loads((GOLDEN / name / "config.json").read_text()) | {"num_hidden_layers": 1, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(GOLDEN / name / "model.safetensors")
    kept = {key: data for key, data in weights.items() if not key.startswith(("model.layers.1.", "model.layers.2."))}
    save_file(kept, tmp_path / "model.safetensors")
    return tmp_path


def rounded(params: Any) -> Any:
    """Return parameters with the rates of delta nets in bfloat16, as a fixture has them: a file has exponentials."""

    def of_layer(layer: Any) -> Any:
        if not isinstance(layer.attention, DeltaNetParams):
            return layer
        rate = layer.attention.rate.astype(jnp.bfloat16)
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rate=rate))

    return dataclasses.replace(params, layers=tuple(map(of_layer, params.layers)))


def plain(config: ModelConfig, context: int) -> dict[str, Any]:
    """Return a config's fields, with the frequencies of rotations in their place."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = value
        if isinstance(value, RopeConfig):
            values[field.name] = value.rotated, value.interleaved
            values[f"{field.name}: frequencies"] = np.hstack(frequencies(value, config.head_dim, context)).tolist()
    return values


def approximately(value: Any) -> Any:
    """Return what equals a number, or a list of them, that was stored as float32."""
    return pytest.approx(value, rel=1e-6) if isinstance(value, float | list) else value


@pytest.mark.parametrize("name", FIXTURES)
def test_a_model_converted_to_gguf_is_the_same_model(tmp_path: Path, name: str) -> None:
    folder = ModelSource(folder_of(name, tmp_path), "folder", name)
    gguf = ModelSource(from_golden(folder.path, tmp_path / "m.gguf"), "gguf", name)
    original, read = (parse_model_config(read_config(source)) for source in (folder, gguf))
    for context in (8, 128):
        expected, found = plain(original, context) | UNTOLD.get(name, {}), plain(read, context)
        assert {key: approximately(value) for key, value in expected.items()} == found
    assert_same_params(*map(rounded, (load_model(gguf), load_model(folder))))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["phi3", "glm4", "cohere2", "granite", "starcoder2", "gemma3"])
def test_blocks_stay_packed(tmp_path: Path, name: str, kind: Kind) -> None:
    """Fused projections are read in parts, and heads in another order, without changing a weight."""
    source = ModelSource(from_golden(name, tmp_path / "m.gguf", kind), "gguf", name)
    config = parse_model_config(read_config(source))
    dtype = np.dtype(jnp.bfloat16)
    abstract = abstract_params(LaidOutModel(config), dtype)
    made = choose_weights("auto", abstract, stored_types(source, config), "gguf", target=CPU, dtype=dtype)
    tree = hold_weights(abstract, made.forms)
    params = build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract))
    exact = load_model(source)
    found = {dotted(path): scheme for path, scheme in made.quantized.items()}
    assert found["layers.1.attention.qkv"] == found["layers.1.mlp.up"] == GGUF_TYPES[kind.name].scheme
    for layer, precise in zip(params.layers, exact.layers):
        np.testing.assert_array_equal(unpack(layer.attention.qkv), precise.attention.qkv)
        np.testing.assert_array_equal(unpack(layer.mlp.up), precise.mlp.up)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_blocks_of_delta_nets_stay_packed(tmp_path: Path, name: str) -> None:
    """The columns of a projection are in the file's order of value heads, too."""
    source = ModelSource(from_golden(name, tmp_path / "m.gguf", Kind.Q8_0), "gguf", name)
    config = parse_model_config(read_config(source))
    dtype = np.dtype(jnp.bfloat16)
    abstract = abstract_params(LaidOutModel(config), dtype)
    made = choose_weights("auto", abstract, stored_types(source, config), "gguf", target=CPU, dtype=dtype)
    tree = hold_weights(abstract, made.forms)
    params = build_params(tree, on_one_device(tree), open_weights(source, tree, dense=abstract))
    own, exact = params.layers[0].attention, load_model(source).layers[0].attention
    np.testing.assert_array_equal(unpack(own.qkvz), exact.qkvz)
    np.testing.assert_array_equal(unpack(own.output), exact.output.reshape(len(exact.output), -1))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_layer_that_drafts_follows_the_model(tmp_path: Path, name: str) -> None:
    """It has the tensors of a layer with attention, and of what joins embeddings and hidden states."""
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copy(GOLDEN / name / "config.json", folder)
    weights = load_file(GOLDEN / name / "model.safetensors")
    config = golden_config(name)
    last, norm = f"model.layers.{config.num_layers - 1}.", weights["model.norm.weight"]
    drafts = {key.replace(last, "mtp.layers.0."): data for key, data in weights.items() if key.startswith(last)}
    norms = {
        f"mtp.{each}.weight": norm + i for i, each in enumerate(("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"))
    }
    joined = {"mtp.fc.weight": np.concatenate([weights["model.embed_tokens.weight"][:32]] * 2, axis=1)}
    save_file(weights | drafts | norms | joined, folder / "model.safetensors")
    gguf = from_golden(folder, tmp_path / "m.gguf")
    head = LaidOutModel(mtp.config_of(config))
    abstract = abstract_params(head, np.dtype(np.float32))
    found = [
        build_params(abstract, on_one_device(abstract), open_weights(source, abstract, part=mtp.prefix_of(config)))
        for source in (ModelSource(gguf, "gguf", "m"), ModelSource(folder, "folder", "m"))
    ]
    assert_same_params(*found)


def test_keys_and_values_of_latent_attention_may_be_one_tensor(tmp_path: Path) -> None:
    """Files of before April 2025 have `kv_b_proj` as it is, and the sizes of heads under other names."""

    def join(tensors: Any) -> None:
        for name in [name for name in tensors if "attn_k_b" in name]:
            (keys, _), (values, _) = tensors.pop(name), tensors.pop(name.replace("k_b", "v_b"))
            whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
            tensors[name.replace("k_b", "kv_b")] = whole.reshape(-1, keys.shape[1]), None

    folder = ModelSource(GOLDEN / "deepseek_v3", "folder", "m")
    expected = parse_model_config(read_config(folder))
    assert expected.latent is not None
    older = {
        "attention.head_count_kv": expected.num_heads,
        "attention.key_length": expected.latent.query,
        "attention.value_length": expected.latent.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    path = from_golden("deepseek_v3", tmp_path / "m.gguf", change=join, keys=older)
    gguf = ModelSource(path, "gguf", "m")
    found = parse_model_config(read_config(gguf))
    assert (found.latent, found.num_heads) == (expected.latent, expected.num_heads)
    assert_same_params(load_model(gguf), load_model(folder))


def test_quantized_parts_of_latent_attention_are_read_by_head(tmp_path: Path) -> None:
    """Blocks of what makes keys lie across: they are numbers of a head's outputs."""
    exact = load_model(ModelSource(GOLDEN / "deepseek_v2_lite", "folder", "m"))
    path = from_golden("deepseek_v2_lite", tmp_path / "m.gguf", Kind.Q8_0)
    assert GGUFMetadata(path).tensors["blk.1.attn_k_b.weight"].ggml_type == Kind.Q8_0
    found = load_model(ModelSource(path, "gguf", "m"))
    for name in ("down", "query", "key_up", "value_up"):
        for layer, precise in zip(found.layers, exact.layers):
            own, other = getattr(layer.attention, name), getattr(precise.attention, name)
            np.testing.assert_allclose(own, other, atol=np.abs(other).max() / 127)
            assert (own != other).any()


@pytest.mark.parametrize(
    ("fields", "model", "groups"),
    [
        ({"n_routed_experts": 160}, "DeepseekV2ForCausalLM", (8, 3)),
        ({"n_routed_experts": 64, "scoring_func": 1}, "DeepseekV2ForCausalLM", (1, 1)),
        ({"n_routed_experts": 256, "scoring_func": 2}, "DeepseekV3ForCausalLM", (8, 4)),
        ({"n_routed_experts": 64, "vocab_size": 154880}, "DeepseekV3ForCausalLM", (1, 1)),
        ({"n_routed_experts": 16, "scoring_func": 2, "n_group": 4, "topk_group": 2}, "DeepseekV3ForCausalLM", (4, 2)),
    ],
)
def test_what_older_files_of_deepseek_leave_out(fields: dict[str, int], model: str, groups: tuple[int, int]) -> None:
    row = ARCHITECTURES["deepseek2"]
    raw = {"architectures": [row.model[0]], "vocab_size": 102400, "rope_parameters": {}, **row.constants, **fields}
    found = {**raw, **row.implied(raw)}
    assert found["architectures"] == [model]
    assert (found["n_group"], found["topk_group"]) == groups


def test_a_model_may_be_split_into_several_files(tmp_path: Path) -> None:
    first = from_golden("llama3", tmp_path / "m.gguf", most=6)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert first.name == names[0] == "m-00001-of-00004.gguf"
    folder = ModelSource(GOLDEN / "llama3", "folder", "m")
    assert_same_params(load_model(ModelSource(first, "gguf", "m")), load_model(folder))
    with pytest.raises(ConfigError, match=r"m-00002-of-00004.gguf is file 2 of the 4 .* pass the first one"):
        GGUFMetadata(tmp_path / names[1])
    third = (tmp_path / names[2]).rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"the first of 4 files .* there is no .*m-00003-of-00004.gguf"):
        GGUFMetadata(first)
    third.write_bytes((tmp_path / names[1]).read_bytes())
    third.rename(tmp_path / names[2])
    with pytest.raises(ConfigError, match=r"m-00003-of-00004.gguf is file 2 of the 4 .* file 3 was expected"):
        GGUFMetadata(first)
