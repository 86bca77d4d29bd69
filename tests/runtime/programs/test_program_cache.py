"""Programs are kept on disk and loaded again; damaged ones are compiled again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.runtime.programs import program_cache
from jaxserve.runtime.programs.compile_counter import CompileCounter
from jaxserve.runtime.programs.program_cache import build_programs
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from tests.runtime.programs.large_pool import CAPACITY, KEYS, first_step
from tests.runtime.tiny import builder
from tests.selection import grid

pytestmark = pytest.mark.slow


def test_kept_programs_are_loaded_and_compute_the_same(programs: dict[ProgramKey, Any], kept: Path) -> None:
    counter = CompileCounter()
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, kept)
    assert (compiled, counter.count) == (0, 0)
    assert list(loaded) == list(programs)
    for ours, theirs in zip(jax.tree.leaves(first_step(loaded)[1:]), jax.tree.leaves(first_step(programs)[1:])):
        np.testing.assert_array_equal(ours, theirs)
    [folder] = kept.iterdir()
    assert {path.name for path in folder.iterdir()} == {f"{key}.xla" for key in KEYS} | {"lock"}


@pytest.mark.parametrize("damage", grid(["empty", "half", "garbage"], lambda damage: damage == "half"))
def test_a_damaged_program_is_compiled_again(
    programs: dict[ProgramKey, Any], kept: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(kept, tmp_path / "kept")
    [path] = (tmp_path / "kept").glob(f"*/{UPDATE_KEY}.xla")
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "garbage": bytes(range(256)) * 40}[damage])
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, tmp_path / "kept")
    assert compiled == 1
    assert "can't be loaded" in caplog.text
    assert int(first_step(loaded)[1].seq_lens[0, 1]) == 3
    assert build_programs(builder(CAPACITY), KEYS, tmp_path / "kept")[1] == 0


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> ProgramKey:
    """A program that is not needed first."""
    wanted = ProgramKey("decode", 4, True)
    monkeypatch.setattr(program_cache, "needed_first", lambda keys: [key for key in keys if key != wanted])
    return wanted


def test_programs_not_needed_first_are_loaded_in_the_background(
    programs: dict[ProgramKey, Any], kept: Path, wanted: ProgramKey
) -> None:
    counter = CompileCounter()
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, kept, background=True)
    assert loaded.substitute(wanted) == wanted  # waits for it
    assert int(first_step(loaded)[1].seq_lens[0, 1]) == 3
    assert set(loaded) == set(KEYS)  # waits for all
    assert (loaded.substitute(wanted), loaded.num_pending, compiled, counter.count) == (wanted, 0, 0, 0)


def test_a_damaged_background_program_is_dropped_and_compiled_by_the_next_start(
    programs: dict[ProgramKey, Any], kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: ProgramKey
) -> None:
    shutil.copytree(kept, tmp_path / "kept")
    [path] = (tmp_path / "kept").glob(f"*/{wanted}.xla")
    path.write_bytes(b"garbage")
    loaded, compiled = build_programs(builder(CAPACITY), KEYS, tmp_path / "kept", background=True)
    assert (set(loaded), compiled) == ({*KEYS} - {wanted}, 0)
    assert loaded.substitute(wanted) == ProgramKey("decode", 4, False)
    assert f"kept program {wanted} can't be loaded" in caplog.text
    assert build_programs(builder(CAPACITY), KEYS, tmp_path / "kept")[1] == 1


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built, compiled = build_programs(builder(CAPACITY), [UPDATE_KEY], None)
    assert (list(built), compiled) == ([UPDATE_KEY], 1)
    assert not list(tmp_path.iterdir())
