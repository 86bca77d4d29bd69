"""Kept programs are code: one that another user may have written is not loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.programs.builder import program_path
from jaxserve.runtime.programs.bundle import BundlePart, load_bundle, read_manifest, write_manifest
from jaxserve.runtime.programs.own_files import UntrustedFileError, check_owner, read_trusted, write_private
from jaxserve.runtime.programs.program_cache import build_programs
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from tests.runtime.tiny import builder

pytestmark = pytest.mark.slow

Spoil = Callable[[Path], None]


@pytest.fixture(params=["group", "others", "owner"])
def spoil(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Makes a path untrusted, in each possible way."""

    def spoil(path: Path) -> None:
        if request.param != "owner":
            path.chmod(path.stat().st_mode | {"group": 0o020, "others": 0o002}[request.param])
        elif os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)

    return spoil


def test_only_the_owner_may_read_or_write_a_written_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "new" / "one", b"code")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o600
    assert read_trusted(tmp_path / "new" / "one") == b"code"


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path, spoil: Spoil) -> None:
    write_private(tmp_path / "folder" / "one", b"code")
    spoil(tmp_path / "folder" / "one")
    with pytest.raises(UntrustedFileError, match=r"one (belongs to another user|may be written by others)"):
        read_trusted(tmp_path / "folder" / "one")
    spoil(tmp_path / "folder")
    with pytest.raises(UntrustedFileError, match=r"folder (belongs to another user|may be written by others)"):
        check_owner(tmp_path / "folder")


@pytest.mark.parametrize("part", ["folder", "file"])
def test_a_bundle_that_others_may_write_is_refused(part: str, tmp_path: Path, spoil: Spoil) -> None:
    folder = tmp_path / "bundle"
    builder().store(builder().compile(UPDATE_KEY), program_path(folder, UPDATE_KEY))
    write_manifest(folder, EngineConfig(model="tiny"), [BundlePart("", builder(), [UPDATE_KEY])])
    manifest = read_manifest(folder)
    load_bundle(folder, manifest, BundlePart("", builder(), [UPDATE_KEY]))
    if part == "folder":
        spoil(folder)
        with pytest.raises(ConfigError, match=r"programs=.*bundle: .*programs are code"):
            read_manifest(folder)
    else:
        spoil(program_path(folder, UPDATE_KEY))
        with pytest.raises(ConfigError, match=r"programs=.*update\.xla .*programs are code"):
            load_bundle(folder, manifest, BundlePart("", builder(), [UPDATE_KEY]))


def test_kept_programs_that_others_may_write_are_compiled_again(
    tmp_path: Path, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    assert build_programs(builder(), [UPDATE_KEY], tmp_path)[1] == 1
    assert build_programs(builder(), [UPDATE_KEY], tmp_path)[1] == 0
    [folder] = tmp_path.iterdir()
    spoil(program_path(folder, UPDATE_KEY))
    assert build_programs(builder(), [UPDATE_KEY], tmp_path)[1] == 1
    assert "programs are code" in caplog.text
    caplog.clear()
    spoil(folder)
    for _ in range(2):  # and not kept there
        assert build_programs(builder(), [UPDATE_KEY], tmp_path)[1] == 1
    assert "no programs are kept" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert build_programs(builder(), [UPDATE_KEY], tmp_path / "file")[1] == 1
    assert "no programs are kept" in caplog.text
