from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from jaxserve import model_source
from jaxserve.cli.main import main
from tests.tiny_model import write_tiny_model


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    asked = []

    def snapshot_download(
        repo: str, *, revision: str | None, cache_dir: Path | None, token: str | None, **_: object
    ) -> str:
        asked.append((repo, revision, cache_dir, token))
        return str(write_tiny_model(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert main(["pull", "org/model", "--revision", "v2", "--download-dir", "/models", "--hf-token", "hf_1"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert asked == [("org/model", "v2", Path("/models"), "hf_1")]
    assert main(["pull", "org/model", "--force"]) == 2
    assert "hf download org/model --force-download" in capsys.readouterr().err


def test_a_built_in_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(model_source, "pull", lambda name, *, force: f"{name} {force}")
    assert main(["pull", "smollm2-135m-instruct", "--force"]) == 0
    assert capsys.readouterr().out == "smollm2-135m-instruct True\n"
    assert main(["pull", "smollm2-135m-instruct", "--revision", "v2"]) == 2
    assert "revision=v2 chooses a version of a model on the hub" in capsys.readouterr().err
