from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli import convert
from jaxserve.cli.common.dispatch import INTERRUPTED
from jaxserve.cli.main import main
from tests.tiny_model import write_tiny_model

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model without weights."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    return write_tiny_model(folder)


@pytest.mark.slow
def test_a_converted_model_answers_as_its_source_does(
    settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "converted"
    argv = [settings["model"], "--load-format", "dummy", "--dtype", "float32", "--output", str(target)]
    assert main(["convert", *argv]) == 0
    out, err = capfd.readouterr()
    assert out == f"{target}\n"
    assert f"jaxserve serve --model {target} --dtype float32 starts with it" in err
    assert "Writing weights: 100%" in err
    assert "WARNING" not in err

    prompts, params = ["Hello", "something longer"], SamplingParams(max_tokens=12, temperature=0.0)
    answers = []
    for changes in ({}, {"model": str(target), "load_format": "auto"}, {"model": str(target), "load_format": "orbax"}):
        with LLM(**{**settings, **changes}) as llm:
            answers.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
    assert answers[0] == answers[1] == answers[2]
    assert main(["plan", str(target), "--target", "nvidia-l4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["weight_bytes"] > 0


def test_a_converted_folder_is_readable_by_others(tiny: Path, tmp_path: Path) -> None:
    """Its permissions follow the umask, not those of a private temporary folder."""
    target = tmp_path / "converted"
    assert main(["convert", str(tiny), "--load-format", "dummy", "--output", str(target)]) == 0
    names = {path.name for path in target.iterdir()}
    assert names == {
        "config.json", "jaxserve_checkpoint.json", "params", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert target.stat().st_mode == tiny.stat().st_mode
    assert json.loads((target / "config.json").read_text()) == json.loads((tiny / "config.json").read_text())


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_an_existing_target_is_not_changed(
    kind: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    assert main(["convert", str(tiny), "--load-format", "dummy", "--output", str(target)]) == 2
    assert f"--output {target} exists already; choose another folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "tiny"]


def test_an_incomplete_model_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(GOLDEN / "llama_sharded", tmp_path / "model"))
    shutil.copy(GOLDEN / "llama2" / "model.safetensors", model / "model.safetensors")
    assert main(["convert", str(model), "--output", str(tmp_path / "made" / "target")]) == 2
    assert "doesn't fit the model its config describes" in capsys.readouterr().err
    assert not any((tmp_path / "made").iterdir())


def test_an_interrupt_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Any, folder: Path) -> None:
        (folder / "params").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_convert", interrupted)
    assert main(["convert", "--output", str(tmp_path / "target")]) == INTERRUPTED
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_created_is_an_error(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["convert", str(tiny), "--output", str(tmp_path / "file" / "target")]) == 2
    assert "can't be created: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "name the folder to create: --output DIR"),
        (["--output", "x", "--tp-size", "2"], "--tp-size is not a known flag"),
        (["--output", "x", "--dtype", "float16"], "the 16-bit type is bfloat16"),
        (["/no/such", "--output", "x"], "there is no such file or folder"),
    ],
)
def test_user_errors(
    argv: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *argv]) == 2
    assert line in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
