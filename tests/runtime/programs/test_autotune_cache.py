"""What XLA tunes on a GPU is kept by device and jaxlib, in a folder that only its owner may write."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.runtime.programs.autotune_cache import autotune_folder, autotune_options, report_tuning
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from tests.runtime.tiny import builder

GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")


def test_the_folder_is_named_by_device_and_jaxlib(tmp_path: Path) -> None:
    folder = autotune_folder(GPU, tmp_path)
    assert folder == tmp_path / "autotune" / f"nvidia-h200-jaxlib-{importlib.metadata.version('jaxlib')}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert autotune_options(folder) == {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}


def test_nothing_is_kept_without_a_trusted_folder_or_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert autotune_folder(GPU, None) is None
    assert autotune_folder(SimpleNamespace(platform="cpu", device_kind="cpu"), tmp_path) is None
    assert not list(tmp_path.iterdir())
    folder = autotune_folder(GPU, tmp_path)
    assert folder is not None
    folder.chmod(0o777)
    assert autotune_folder(GPU, tmp_path) is None
    assert "may be written by others" in caplog.text
    assert autotune_options(None) == {}


def test_the_log_tells_known_products_from_new_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.runtime")
    (tmp_path / "one.textproto").touch()
    with report_tuning(tmp_path, 7):
        (tmp_path / "two.textproto").touch()
        (tmp_path / "three.textproto").touch()
    before, after = caplog.messages
    assert before.startswith("compiling 7 programs; ")
    assert "1 of them are known" in before
    assert "; 2 matrix products were tried out for" in after


def test_a_builder_adds_options_that_are_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    lowered = SimpleNamespace(compile=given.append)
    monkeypatch.setattr(ProgramBuilder, "lower", lambda self, key: lowered)
    plain = builder()
    plain.compile(UPDATE_KEY)
    added = plain.with_options({"some_option": "x"})
    added.compile(UPDATE_KEY)
    assert given == [given[0], {**given[0], "some_option": "x"}]
    assert added.facts() == plain.facts()
