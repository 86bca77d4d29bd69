"""Damages every file of a model, field by field and byte by byte: it loads, or one of our errors says what is wrong."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.layers.rope import frequencies
from jaxserve.model_source import read_config, resolve
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizers.token_bytes import byte_alphabet
from jaxserve.text.tokenizers.tokenizer import load_tokenizer
from jaxserve.weights import check_tensors, open_weights
from jaxserve.weights.arrays import flatten
from tests.model_source.gguf_files import write_gguf
from tests.tiny_model import CONFIG, TEMPLATE, VOCAB_SIZE, write_tiny_model

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 32, 4, 2, 16, 48
DEEP = "[" * 100_000 + "]" * 100_000
NUMBERS = [-1, 0, 2**31 - 1, 2**31, 2**63, -0.5, 1e308, float("nan"), float("inf")]
VALUES = [*NUMBERS, None, True, "", "x", [], [5], [None], ["x"], [[]], {}, {"x": 1}, [{"name": 5}], 10**400]
MEMORY = 512 << 20


def load(model: Path) -> ModelConfig:
    """Read all files of a model as the engine does, weights included, without a device."""
    source = resolve(str(model))
    config = parse_model_config(read_config(source), str(source.config_file))
    inverse, scale = frequencies(config.rope, config.head_dim)
    assert np.isfinite(inverse).all()
    assert np.isfinite(scale).all()
    tokenizer = load_tokenizer(source)
    assert all(token_id >= 0 for token_id in tokenizer.eos_ids)
    tokenizer.decode(tokenizer.encode("Hello <s>"))
    tokenizer.min_num_tokens("Hello")
    ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    check_tensors(source, config)
    abstract = abstract_params(LaidOutModel(config), np.dtype(np.float32))
    reader = open_weights(source, abstract)
    for path, spec in flatten(abstract)[0]:
        out = np.empty(spec.shape, spec.dtype)
        reader.fill(path, spec, tuple(slice(0, length) for length in spec.shape), out)
        assert np.isfinite(out).all()
    return config


def load_error(model: Path) -> str:
    """Return the error message of loading a model; empty if it loads.

    Raises on any error but ours, and if loading takes too much memory.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load(model)
        message = ""
    except JaxserveError as error:
        message = str(error)
        assert 0 < len(message) < 3000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY
    return message


def tensors(names: Callable[[str, int | None], str]) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {"q": (HEADS * HEAD_DIM, HIDDEN), "k": (KV_HEADS * HEAD_DIM, HIDDEN), "v": (KV_HEADS * HEAD_DIM, HIDDEN)}
    shapes |= {"o": (HIDDEN, HEADS * HEAD_DIM), "gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}
    norms = {"before": (HIDDEN,), "after": (HIDDEN,)}
    tops = {"embed": (VOCAB_SIZE, HIDDEN), "norm": (HIDDEN,), "head": (VOCAB_SIZE, HIDDEN)}
    places = [(part, None, shape) for part, shape in tops.items()]
    places += [(part, layer, shape) for layer in range(LAYERS) for part, shape in (shapes | norms).items()]
    return {names(part, layer): np.ones(shape, np.float32) for part, layer, shape in places}


def hf_name(part: str, layer: int | None) -> str:
    top = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inner = {part: f"self_attn.{part}_proj" for part in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    inner |= {"before": "input_layernorm", "after": "post_attention_layernorm"}
    return f"{top[part]}.weight" if layer is None else f"model.layers.{layer}.{inner[part]}.weight"


def gguf_name(part: str, layer: int | None) -> str:
    top = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
    inner = {
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "before": "attn_norm",
        "after": "ffn_norm",
    }
    inner |= {part: f"ffn_{part}" for part in ("gate", "up", "down")}
    return f"{top[part]}.weight" if layer is None else f"blk.{layer}.{inner[part]}.weight"


@pytest.fixture(scope="module")
def intact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("whole"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    save_file(tensors(hf_name), folder / "model.safetensors")
    assert load(folder).num_layers == LAYERS
    return folder


@pytest.fixture
def folder(intact_folder: Path, tmp_path: Path) -> Path:
    """A folder of links to the intact files, like the hub's cache; tests replace some of them."""
    made = tmp_path / "model"
    made.mkdir()
    for file in intact_folder.iterdir():
        (made / file.name).symlink_to(file)
    return made


def put(folder: Path, name: str, content: str | bytes) -> None:
    file = folder / name
    file.unlink(missing_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))


ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True,
    "low_freq_factor": 1, "high_freq_factor": 4, "factors": [1.0], "partial_rotary_factor": 1.0, "type": "yarn",
}  # fmt: skip
OTHERS = ("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "quantization_config", "attention_bias",
          "mlp_bias", "max_window_layers", "use_sliding_window", "hidden_act", "unheard_of")  # fmt: skip


SOME = pytest.mark.parametrize("most", [120, pytest.param(10**6, marks=pytest.mark.grid)], ids=["some", "all"])
"""Runs some of the cases; all of them take half a minute."""


def some[T](cases: list[T], most: int) -> list[T]:
    return random.Random(0).sample(cases, min(most, len(cases)))


@SOME
def test_every_field_of_config_json(folder: Path, most: int) -> None:
    cases = [{field: value} for field in (*CONFIG, *OTHERS) for value in VALUES]
    cases += [{"rope_scaling": {**ROPE, field: value}} for field in ROPE for value in VALUES]
    for case in some(cases, most):
        put(folder, "config.json", json.dumps({**CONFIG, **case}))
        load_error(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@SOME
def test_every_field_of_the_tokenizers_files(folder: Path, name: str, most: int) -> None:
    fields = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "eos_token_id": 1}
    cases = [(field, value) for field in (*fields, "add_bos_token", "add_eos_token") for value in VALUES]
    for field, value in some(cases, most // 4):
        put(folder, name, json.dumps({**fields, "add_bos_token": True, field: value}))
        load_error(folder)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json",
     "model.safetensors.index.json"],
)  # fmt: skip
def test_a_file_that_is_no_json_is_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    for content in ("", "{", "[]", "5", DEEP, f'{{"x": {DEEP}}}', b"\xff\xfe", '{"eos_token_id": ' + "9" * 5000 + "}"):
        put(folder, name, content)
        assert name in load_error(folder), content[:20]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every object and list inside `value`, with each of its keys."""
    for key in value if isinstance(value, dict) else range(min(2, len(value))) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


@SOME
def test_every_field_of_tokenizer_json(folder: Path, most: int) -> None:
    whole = (folder / "tokenizer.json").read_text()
    count = sum(1 for _ in places(json.loads(whole)))
    rng = random.Random(0)
    for number in some(list(range(count)), most // 2):
        damaged = json.loads(whole)
        owner, key = list(places(damaged))[number]
        owner[key] = rng.choice([value for value in VALUES if value == value])
        put(folder, "tokenizer.json", json.dumps(damaged))
        load_error(folder)


@pytest.mark.parametrize(
    "file",
    ["../../etc/passwd", "/etc/passwd", "../model/model.safetensors", ".", "..", "", "a\0b", 5, None, [], "x/y"],
)
def test_an_index_may_name_only_files_of_the_folder(folder: Path, file: Any) -> None:
    put(folder, "model.safetensors.index.json", json.dumps({"weight_map": {"lm_head.weight": file}}))
    (folder / "model.safetensors").unlink()

    assert "only files of the folder itself are opened" in load_error(folder)


def test_an_index_of_links_is_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = dict.fromkeys(tensors(hf_name), "model-1.safetensors")
    put(folder, "model.safetensors.index.json", json.dumps({"weight_map": names}))

    assert load_error(folder) == ""


def test_bytes_of_safetensors(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(0)
    for length in (0, 7, 8, 100, header + 8, len(whole) - 1):
        put(folder, "model.safetensors", whole[:length])
        assert load_error(folder), length
    for size in (2**63, 2**31, header + 1, header - 1, 0):
        put(folder, "model.safetensors", struct.pack("<Q", size) + whole[8:])
        assert load_error(folder), size
    for _ in range(60):
        damaged = bytearray(whole)
        for position in rng.choices(range(8 + header), k=3):
            damaged[position] = rng.randrange(256)
        put(folder, "model.safetensors", bytes(damaged))
        load_error(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_nan_or_infinite_is_named(folder: Path, name: str, value: float) -> None:
    made = tensors(hf_name)
    made[name].flat[-1] = value
    (folder / "model.safetensors").unlink()
    save_file(made, folder / "model.safetensors")

    assert f"tensor {name} holds NaN or infinity" in load_error(folder)


GGUF_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*byte_alphabet().values(), "<s>", "</s>"],
    "tokenizer.ggml.token_type": [*[1] * 256, 3, 3],
    "tokenizer.ggml.merges": ["a"],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.chat_template": TEMPLATE,
}
GGUF_KEYS: dict[str, Any] = {
    "llama.attention.key_length": HEAD_DIM,
    "llama.feed_forward_length": MLP,
    "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
}


def gguf(path: Path, values: dict[str, Any] | None = None, **changed: np.ndarray[Any, Any]) -> Path:
    kept = {key: value for key, value in (GGUF_TOKENIZER | GGUF_KEYS | (values or {})).items() if value is not None}
    return write_gguf(path / "m.gguf", values=kept, tensors=tensors(gguf_name) | changed)


@pytest.fixture(scope="module")
def intact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf")
    file = gguf(path)
    assert load(file).num_layers == LAYERS
    return file


@SOME
def test_every_key_of_a_gguf_file(tmp_path: Path, most: int) -> None:
    keys = [
        *("llama.context_length", "llama.embedding_length", "llama.block_count", "llama.attention.head_count"),
        *("llama.attention.head_count_kv", "llama.attention.layer_norm_rms_epsilon", "llama.attention.sliding_window"),
        *("general.alignment", "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "llama.rope.dimension_count"),
        *("llama.rope.scaling.yarn_beta_fast", "llama.rope.scaling.attn_factor", *GGUF_KEYS, *GGUF_TOKENIZER),
    ]
    values = [value for value in VALUES if isinstance(value, int | float | str) and value != 10**400]
    cases = [(key, value) for key in keys for value in (*values, [5, 5], ["x", ""])]
    for key, value in some(cases, most):
        load_error(gguf(tmp_path, {key: value}))


@SOME
def test_bytes_of_a_gguf_file(tmp_path: Path, intact_gguf: Path, most: int) -> None:
    rng, damaged = random.Random(0), tmp_path / "m.gguf"
    begin = min(info.offset for info in GGUFMetadata(intact_gguf).tensors.values())
    whole = intact_gguf.read_bytes()
    for number in range(min(most, 2000)):
        content = bytearray(whole)
        for position in rng.choices(range(4, begin), k=1 + number % 3):
            content[position] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        damaged.write_bytes(content[: rng.randrange(len(content))] if number % 10 == 0 else content)
        load_error(damaged)


def refused_gguf(tmp_path: Path, values: dict[str, Any]) -> str:
    return load_error(gguf(tmp_path, values))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("llama.block_count", 2**31 - 1, r"[1, 4096], it is 2147483647"),
        ("llama.attention.head_count", 0, "it is 0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "[1e-30, 1], it is nan"),
        ("llama.attention.layer_norm_rms_epsilon", -1e-5, "[1e-30, 1], it is -"),
        ("llama.rope.freq_base", 0.0, "it is 0.0"),
        ("llama.rope.scaling.factor", -1.0, "it is -1.0"),
        ("llama.context_length", 0, "it is 0"),
    ],
)
def test_a_gguf_file_key_and_value_are_named(tmp_path: Path, key: str, value: Any, allowed: str) -> None:
    message = refused_gguf(tmp_path, {key: value})

    assert f"m.gguf: {key} should be" in message
    assert allowed in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2**31 - 1),
        ("num_attention_heads", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 0),
        ("rope_theta", "x"),
        ("rope_theta", 0),
        ("rope_scaling", "x"),
        ("max_position_embeddings", 0),
        ("eos_token_id", "x"),
    ],
)
def test_a_field_of_config_json_is_named(folder: Path, field: str, value: Any) -> None:
    (folder / "generation_config.json").unlink()
    put(folder, "config.json", json.dumps({**CONFIG, field: value}))
    message = load_error(folder)

    assert f"config.json: {field} should be" in message
    assert f"it is {value!r}" in message


def test_a_negative_rope_factor_is_refused(folder: Path) -> None:
    put(folder, "config.json", json.dumps({**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": -1}}))
    assert "rope_scaling: factor should be a number in [1, 1000000], it is -1" in load_error(folder)


def test_a_list_of_templates_is_checked(folder: Path) -> None:
    put(folder, "tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "x"}, 5]}))
    assert "tokenizer_config.json: chat_template should be a string, or a list of objects" in load_error(folder)


def test_missing_layers_are_found_before_anything_is_compiled(folder: Path) -> None:
    put(folder, "config.json", json.dumps({**CONFIG, "num_hidden_layers": 4096}))
    source = resolve(str(folder))
    with pytest.raises(ConfigError, match=r"36846 tensors are missing: model\.layers\.10\."):
        check_tensors(source, parse_model_config(read_config(source)))


def test_offsets_of_gguf_tensors(tmp_path: Path) -> None:
    whole = bytearray(gguf(tmp_path).read_bytes())
    place = whole.index(b"output.weight") + len(b"output.weight") + 4 + 16 + 4
    (offset,) = struct.unpack_from("<Q", whole, place)
    for changed, words in ((offset + 4, "no multiple of 32"), (offset - 64, "overlap"), (2**62, "ends at byte")):
        struct.pack_into("<Q", whole, place, changed)
        (tmp_path / "m.gguf").write_bytes(whole)
        assert words in load_error(tmp_path / "m.gguf")


def test_a_copy_loads(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert load_error(tmp_path / "copy") == ""
