from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxserve.errors import ConfigError, ModelNotFoundError
from jaxserve.model_source import (
    CHECKPOINT_FILE,
    ModelSource,
    fetch_config,
    find_tokenizer_files,
    read_config,
    resolve,
    resolve_local,
)
from jaxserve.model_source.hub import _UNWANTED_FILES
from jaxserve.model_source.source import _HUB_FILES
from tests.model_source.gguf_files import VOCAB, write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def test_a_folder(folder: Path) -> None:
    source = resolve(str(folder))

    assert source == ModelSource(folder, "folder", "my-model")
    assert read_config(source) == {"model_type": "llama"}


def test_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.Q4.gguf")

    source = resolve(str(path))

    assert source == ModelSource(path, "gguf", "small.Q4")
    assert read_config(source)["vocab_size"] == VOCAB


def test_resolve_local_returns_files_with_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_local(str(path)) == resolve(str(path))
    for other in (tmp_path, tmp_path / "config.json", "some/hub-id", tmp_path / "missing.gguf"):
        assert resolve_local(str(other)) is None


def test_a_relative_path_and_home_are_understood(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder.parent))

    assert resolve(".").name == "my-model"
    assert resolve("~/my-model").path == folder


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nothing", "../x", "~/no-such-model", "missing.gguf", "a/b.gguf"]
)
def test_a_path_that_does_not_exist(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such file or folder"):
        resolve(model)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    write_gguf(tmp_path / "a.gguf")
    with pytest.raises(ModelNotFoundError, match=r"it holds a\.gguf: pass that file itself"):
        resolve(str(tmp_path))


def test_a_folder_in_mistrals_own_format(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 4096}')
    (tmp_path / "consolidated.safetensors").write_bytes(b"")

    with pytest.raises(ModelNotFoundError, match=r"in Mistral's own format \(params\.json.*Hugging Face's format"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).kind == "folder"


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("tokenizer.model", True),
        ("tekken.json", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/rag.jinja", True),
        ("consolidated.safetensors", False),
        ("pytorch_model.bin", False),
        ("original/params.json", False),
        ("original/tokenizer.model", False),
        ("onnx/model.safetensors", False),
        ("1_Pooling/config.json", True),
        ("2_Dense/model.safetensors", True),
        ("2_Dense/pytorch_model.bin", False),
        ("config_sentence_transformers.json", True),
        ("onnx/config.json", False),
        ("0nnx/model.safetensors", False),
        ("merges.txt", True),
        ("original/merges.txt", False),
    ],
)
def test_the_files_that_are_downloaded(file: str, wanted: bool) -> None:
    chosen = filter_repo_objects([file], allow_patterns=list(_HUB_FILES), ignore_patterns=list(_UNWANTED_FILES))

    assert list(chosen) == ([file] if wanted else [])


def test_the_files_of_a_tokenizer(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "1_Pooling").mkdir()
    kept = ["1_Pooling/config.json", "additional_chat_templates/rag.jinja", "chat_template.jinja", "modules.json"]
    kept += ["tekken.json", "tokenizer.model"]
    for name in [*kept, "model.safetensors", "model.safetensors.index.json"]:
        (folder / name).write_text("{}")

    assert [str(file.relative_to(folder)) for file in find_tokenizer_files(folder)] == kept


def test_a_converted_folder(folder: Path) -> None:
    (folder / CHECKPOINT_FILE).write_text("{}")

    source = resolve(str(folder))

    assert source == ModelSource(folder, "orbax", "my-model")
    assert (read_config(source), source) == fetch_config(str(folder)) == ({"model_type": "llama"}, source)


def test_an_orbax_checkpoint_that_is_no_converted_folder(tmp_path: Path) -> None:
    params = tmp_path / "params"
    params.mkdir()
    (params / "_METADATA").write_text("{}")

    for path in (tmp_path, params):
        with pytest.raises(ModelNotFoundError, match=rf"{params} is an Orbax checkpoint, but only a whole folder of"):
            resolve(str(path))
    (tmp_path / CHECKPOINT_FILE).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=rf"it is a part of {tmp_path}: pass that"):
        resolve(str(params))
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json.*copy it again"):
        resolve(str(tmp_path))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not that")

    with pytest.raises(ModelNotFoundError, match="not a GGUF file; for safetensors pass the folder"):
        resolve(str(path))


def test_a_wrong_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m-instruct'"):
        resolve("smollm2-135m-instrct")


def test_a_builtin_model_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path))

    with pytest.raises(ModelNotFoundError, match="run `jaxserve pull smollm2-135m-instruct` where the network is"):
        resolve("smollm2-135m-instruct", offline=True)


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_hub_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", by_environment)

    with pytest.raises(ModelNotFoundError, match=r"downloads are off\. Download it where the network is"):
        resolve("some-org/some-model", offline=not by_environment)


def test_a_hub_id_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--some-org--some-model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)

    source = ModelSource(snapshot, "folder", "some-org/some-model")
    assert resolve("some-org/some-model", offline=True) == source
    assert resolve_local("some-org/some-model") is None
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    assert resolve_local("some-org/some-model") is None
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert resolve_local("some-org/some-model") == source


@pytest.mark.parametrize(("content", "message"), [("{broken", "can't be read as JSON"), ("[1]", "holds a list")])
def test_a_broken_config(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=message):
        read_config(resolve(str(folder)))


def test_importing_it_imports_no_large_library() -> None:
    code = "import sys, json, jaxserve.model_source; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    assert not {"jax", "numpy", "gguf", "huggingface_hub", "transformers"} & set(loaded)
