from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.weights.hf import SafetensorsFolder
from jaxserve.weights.source import BLOCK_ELEMENTS
from tests.weights.conftest import GOLDEN, assert_same_params, load_model

INDEX = "model.safetensors.index.json"


def read(source: SafetensorsFolder, name: str, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    out = np.full(source.infos[name].shape, np.nan, dtype)
    source.read(name, tuple(slice(0, length) for length in out.shape), out)
    return out


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_was_stored(tmp_path: Path, rng: np.random.Generator, stored: Any) -> None:
    rows = BLOCK_ELEMENTS // 64 + 3  # more than one block
    tensors = {"w": rng.standard_normal((rows, 64)).astype(stored), "v": rng.standard_normal(5).astype(stored)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    assert {name: info.shape for name, info in source.infos.items()} == {"w": (rows, 64), "v": (5,)}
    assert not any(info.unreadable for info in source.infos.values())
    for name, array in tensors.items():
        np.testing.assert_array_equal(read(source, name), array.astype(np.float32))
    part = np.empty((2, 64, 2), np.float32)[..., 0]  # any strides, any rows
    source.read("w", (slice(7, 9), slice(0, 64)), part)
    np.testing.assert_array_equal(part, tensors["w"][7:9].astype(np.float32))
    part = np.empty((rows - 3, 9), np.float32)  # any columns too
    source.read("w", (slice(3, rows), slice(40, 49)), part)
    np.testing.assert_array_equal(part, tensors["w"][3:, 40:49].astype(np.float32))


@pytest.mark.parametrize(("stored", "name"), [(np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_types_other_than_floats_are_refused_by_name(tmp_path: Path, stored: Any, name: str) -> None:
    save_file({"w": np.ones((2, 2), np.float32).astype(stored)}, tmp_path / "model.safetensors")
    info = SafetensorsFolder(tmp_path).infos["w"]
    assert name in info.unreadable
    assert "BF16" in info.unreadable


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model."])
def test_a_text_model_beside_an_encoder_of_images_loads_under_old_and_new_names(prefix: str, tmp_path: Path) -> None:
    folder = GOLDEN / "gemma3_multimodal"
    shutil.copy(folder / "config.json", tmp_path)
    old = "language_model.model."
    tensors = {
        f"{prefix}{name.removeprefix(old)}" if name.startswith(old) else f"model.{name}": array
        for name, array in load_file(folder / "model.safetensors").items()
    }
    assert any(name.startswith("model.vision_tower.") for name in tensors)
    tensors["lm_head.weight"] = tensors[f"{prefix}embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_params(
        load_model(ModelSource(folder, "folder", "old")), load_model(ModelSource(tmp_path, "folder", "new"))
    )


def test_a_model_saved_without_its_head_has_names_of_its_own(tmp_path: Path) -> None:
    folder = GOLDEN / "qwen3"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = {name.removeprefix("model."): each for name, each in load_file(folder / "model.safetensors").items()}
    assert "layers.0.input_layernorm.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_params(
        load_model(ModelSource(folder, "folder", "whole")), load_model(ModelSource(tmp_path, "folder", "bare"))
    )
    drafting = {**tensors, "fc.weight": np.zeros((1, 1), np.float32)}
    save_file(drafting, tmp_path / "model.safetensors")
    assert SafetensorsFolder(tmp_path).infos.keys() == drafting.keys(), "a head that drafts keeps its names"


def test_weights_of_dense_layers_are_in_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "st.Dense", "path": "2_Dense"}]))
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"2_Dense has no model.safetensors; pytorch_model.bin is a pickle, .*python -c"
    ):
        SafetensorsFolder(tmp_path)
    save_file({"linear.weight": np.full((1, 1), 3, np.float32)}, tmp_path / "2_Dense" / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    assert read(source, "2_Dense/linear.weight") == source.array("2_Dense/linear.weight") == 3


def test_a_sharded_folder_equals_the_single_file(tmp_path: Path) -> None:
    folder = GOLDEN / "llama_sharded"
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 3
    shutil.copy(folder / "config.json", tmp_path)
    save_file({k: v for shard in shards for k, v in load_file(shard).items()}, tmp_path / "model.safetensors")
    assert_same_params(
        load_model(ModelSource(folder, "folder", "sharded")), load_model(ModelSource(tmp_path, "folder", "single"))
    )


def test_missing_shards_are_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama_sharded", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of the 3 files .* model-00002-of-00003\.safetensors"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_the_index_names_but_no_shard_has_is_missing(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama_sharded", tmp_path, dirs_exist_ok=True)
    shard = tmp_path / "model-00003-of-00003.safetensors"
    tensors = load_file(shard)
    lost = sorted(tensors)[-1]
    del tensors[lost]
    save_file(tensors, shard)
    with pytest.raises(ConfigError, match=f"1 tensor is missing: {lost}"):
        load_model(ModelSource(tmp_path, "folder", "x"))


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    for value, file in ((1, "a.safetensors"), (2, "b.safetensors")):
        save_file({"w": np.full((2, 2), value, np.float32)}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "b.safetensors"}}))
    assert (read(SafetensorsFolder(tmp_path), "w") == 2).all()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ConfigError, match=INDEX.replace(".", r"\.")):
        SafetensorsFolder(tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    whole = (GOLDEN / "llama2" / "model.safetensors").read_bytes()
    for end in (len(whole) - 1000, 100, 4, 0):
        (tmp_path / "model.safetensors").write_bytes(whole[:end])
        with pytest.raises(ConfigError, match=r"model\.safetensors can't be read as safetensors"):
            SafetensorsFolder(tmp_path)


def test_one_safetensors_file_may_have_any_name_but_two_need_an_index(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "weights.safetensors")
    assert list(SafetensorsFolder(tmp_path).infos) == ["w"]
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match="has 2 safetensors files but no"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors.* run `hf download ORG/NAME --local-dir FOLDER`"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    (tmp_path / "pytorch_model-00002-of-00002.bin").write_bytes(b"")
    command = rf"M\.from_pretrained\('{tmp_path}', dtype='auto'\)\.save_pretrained\('NEW_FOLDER'\)"
    with pytest.raises(ConfigError, match=rf"00002\.bin is a pickle.*run `python -c .*{command}"):
        SafetensorsFolder(tmp_path)


def test_a_pickle_is_converted_without_transformers_as_it_may_be_a_head(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    command = rf"torch\.load\('{tmp_path}/pytorch_model\.bin'.*save_file\(.*'{tmp_path}/model\.safetensors'\)\"`"
    with pytest.raises(ConfigError, match=rf"pytorch_model\.bin is a pickle.*run `python -c .*{command}"):
        SafetensorsFolder(tmp_path)


def test_weights_in_mistrals_own_format_are_refused_by_name(tmp_path: Path) -> None:
    weights = {"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}
    save_file(weights, tmp_path / "consolidated.safetensors")

    with pytest.raises(ConfigError, match=r"consolidated\*\.safetensors is in Mistral's own format: get the files"):
        SafetensorsFolder(tmp_path)
    save_file(weights, tmp_path / "weights.safetensors")
    assert list(SafetensorsFolder(tmp_path).infos) == list(weights)


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda folder: folder.name)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_golden_checkpoint_is_loaded(folder: Path, dtype: Any) -> None:
    params = load_model(ModelSource(folder, "folder", folder.name), dtype)
    stored = {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}
    [embedding] = [array for name, array in stored.items() if name.endswith("embed_tokens.weight")]
    np.testing.assert_array_equal(np.asarray(params.embedding), embedding.astype(dtype))
