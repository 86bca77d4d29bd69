"""Which files of which version are fetched; the hub is a function that notes what it was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxserve.config.model_files import (
    draft_files,
    fetch_files,
    has_other_tokenizer,
    local_model_files,
    model_files,
    tokenizer_files,
)
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import fetch_served_checkpoint
from jaxserve.errors import ConfigError, ModelNotFoundError
from jaxserve.runtime.sizing.deployment import read_model, read_stored
from tests.tiny_model import CONFIG, write_tiny_model

MODEL, OTHER = "org/model", "org/other"
TOKEN = "hf_test"
# (the model, its revision, the folder of downloads)
Asked = tuple[str, str | None, str | None]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What was asked of a hub that has all models in all revisions, each in a folder of its own."""
    asked: list[Asked] = []

    def snapshot_download(
        repo: str, *, revision: str | None, cache_dir: Path | None, local_files_only: bool, token: str, **_: object
    ) -> str:
        assert token == TOKEN
        folder = None if cache_dir is None else str(cache_dir)
        asked.append((repo, revision, folder))
        here = tmp_path / f"{repo.replace('/', '--')}@{revision}@{len(folder or '')}"
        if local_files_only and not here.exists():
            raise errors.LocalEntryNotFoundError("not here")
        if revision == "reset":
            raise RuntimeError("connection reset")
        if revision == "gone":
            raise errors.RevisionNotFoundError("gone", response=Gone())  # type: ignore[arg-type]
        here.mkdir(exist_ok=True)
        write_tiny_model(here, max_position_embeddings=32 if revision is None else 48)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


class Gone:
    """As much of a response as the hub's errors read."""

    headers: Mapping[str, str] = {}
    request = None
    status_code = 404


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": MODEL, "load_format": "dummy", "hf_token": TOKEN} | settings)


def test_the_model_has_its_revision_and_its_folder_everywhere(asked: list[Asked]) -> None:
    one = config(revision="v2", download_dir="/models")
    raw = json.loads(model_files(one).config_file.read_text())

    assert raw == CONFIG | {"max_position_embeddings": 48}
    assert fetch_served_checkpoint(one).raw == raw
    assert read_model(one).max_position_embeddings == 48
    assert local_model_files(one) is None  # it has no weights
    assert read_stored(one, read_model(one)) == {}
    assert tokenizer_files(one) == model_files(one)
    assert not has_other_tokenizer(one)
    assert set(asked) == {(MODEL, "v2", "/models")}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (MODEL, None, None)),
        ({"revision": "v2"}, (MODEL, "v2", None)),
        ({"revision": "v2", "tokenizer_revision": "v2"}, (MODEL, "v2", None)),
        ({"revision": "v2", "tokenizer_revision": "v3"}, (MODEL, "v3", None)),
        ({"revision": "v2", "tokenizer_path": MODEL}, (MODEL, "v2", None)),
        ({"revision": "v2", "tokenizer_path": OTHER}, (OTHER, None, None)),
        ({"tokenizer_path": OTHER, "tokenizer_revision": "v3", "download_dir": "/d"}, (OTHER, "v3", "/d")),
    ],
)
def test_the_tokenizer_is_the_models_unless_another_is_named(
    settings: dict[str, Any], wanted: Asked, asked: list[Asked]
) -> None:
    one = config(**settings)
    tokenizer_files(one)

    assert asked == [wanted]
    assert has_other_tokenizer(one) == (wanted[:2] != (MODEL, settings.get("revision")))


def test_a_model_that_drafts_has_no_revision_of_another(asked: list[Asked]) -> None:
    draft = {"speculative_method": "draft", "revision": "v2", "download_dir": "/d"}
    draft_files(config(**draft, speculative_model=OTHER))
    draft_files(config(**draft, speculative_model=MODEL))

    assert asked == [(OTHER, None, "/d"), (MODEL, "v2", "/d")]


def test_all_files_are_fetched_at_once(asked: list[Asked]) -> None:
    fetch_files(config(tokenizer_path="org/tokenizer", speculative_method="draft", speculative_model=OTHER))

    assert asked == [(MODEL, None, None), ("org/tokenizer", None, None), (OTHER, None, None)]


def test_a_revision_of_what_is_no_model_of_the_hub_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    for model in (str(tmp_path), "smollm2-135m-instruct", "/no/such/folder"):
        for find in (model_files, fetch_served_checkpoint, fetch_files):
            with pytest.raises(ConfigError, match=f"revision=v2 chooses a version .* and {model} is a built-in"):
                find(EngineConfig(model=model, revision="v2"))
    with pytest.raises(ConfigError, match="tokenizer_revision=v3 chooses a version"):
        tokenizer_files(EngineConfig(model=MODEL, tokenizer_path=str(tmp_path), tokenizer_revision="v3"))


def test_a_revision_that_the_hub_does_not_have(asked: list[Asked]) -> None:
    with pytest.raises(ModelNotFoundError, match="the hub's model 'org/model' has no revision 'gone'"):
        model_files(config(revision="gone"))
    with pytest.raises(ConfigError, match="tokenizer_path=org/other: the hub's model 'org/other' has no revision"):
        tokenizer_files(config(tokenizer_path=OTHER, tokenizer_revision="gone"))


def test_any_error_of_a_download(asked: list[Asked]) -> None:
    with pytest.raises(ModelNotFoundError, match="could not get hub model 'org/model' at revision 'reset': connection"):
        model_files(config(revision="reset"))


def test_what_is_in_no_folder_is_an_error_that_names_the_revision(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    wanted = "'org/model' at revision 'v2' is not in .*, and downloads are off.*hf download org/model --revision v2"
    with pytest.raises(ModelNotFoundError, match=wanted):
        model_files(config(revision="v2", download_dir=str(tmp_path)))


def test_a_folder_of_downloads_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    write_tiny_model(snapshot)
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "v2").write_text("1" * 40)

    for revision in ("v2", "1" * 40):
        assert model_files(config(revision=revision, download_dir=str(tmp_path))).path == snapshot
    with pytest.raises(ModelNotFoundError, match=f"is not in {tmp_path}"):
        model_files(config(download_dir=str(tmp_path)))
