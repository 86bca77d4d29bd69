"""A bundle loads if all facts that its programs depend on are the same; else the error names those that differ."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.programs.builder import program_path
from jaxserve.runtime.programs.bundle import BundlePart, load_bundle, read_manifest, sized_like_bundle, write_manifest
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from tests.runtime.tiny import CAPACITY, builder, open_slots, opening, zero_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one program."""
    folder = tmp_path_factory.mktemp("bundle")
    builder().store(builder().compile(UPDATE_KEY), program_path(folder, UPDATE_KEY))
    write_manifest(
        folder, EngineConfig(model="tiny", page_size=4, hf_token="hf_1"), [BundlePart("", builder(), [UPDATE_KEY])]
    )
    return folder


def _edited(whole: Path, folder: Path, edit: Any) -> Path:
    manifest = json.loads((whole / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    program_path(folder, UPDATE_KEY).write_bytes(program_path(whole, UPDATE_KEY).read_bytes())
    return folder


def test_the_manifest_describes_the_bundle(whole: Path) -> None:
    manifest = read_manifest(whole)
    assert (manifest.model, manifest.settings) == (
        "tiny",
        {"model": "tiny", "page_size": 4, "hf_token": "***"},
    )
    assert manifest.programs == ["update"]
    assert manifest.pool_tokens == CAPACITY.num_pages * CAPACITY.page_size
    assert {"model", "sizes", "jax", "jaxlib", "device", "XLA_FLAGS", "sources"} <= set(manifest.facts)
    assert manifest.facts["jax"] == jax.__version__


def test_another_patch_release_of_python_loads_it(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, patch = platform.python_version_tuple()
    monkeypatch.setattr(platform, "python_version_tuple", lambda: (major, minor, f"{patch}9"))
    assert load_bundle(whole, read_manifest(whole), BundlePart("", builder(), [UPDATE_KEY])) is not None
    monkeypatch.setattr(platform, "python_version_tuple", lambda: (major, f"{minor}9", patch))
    with pytest.raises(ConfigError, match=rf"python is '{major}\.{minor}' in the bundle and '{major}\.{minor}9' here"):
        load_bundle(whole, read_manifest(whole), BundlePart("", builder(), [UPDATE_KEY]))


def test_the_programs_of_a_bundle_run(whole: Path) -> None:
    loaded = load_bundle(whole, read_manifest(whole), BundlePart("", builder(), [UPDATE_KEY]))
    assert loaded is not None
    opened = opening(2, prompt=[1], num_cached_tokens=3)
    state = open_slots(loaded, zero_state(CAPACITY), opened)
    assert np.asarray(state.seq_lens)[0].tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("jaxlib",), "0.1", "jaxlib is '0.1' in the bundle and"),
        (("sizes", "num_slots"), 9, "sizes.num_slots is 9 in the bundle and 4 here"),
        (("model", "norm_eps"), 0.5, "model.norm_eps is 0.5 in the bundle and 1e-05 here"),
        (("device",), "tpu TPU v5 lite", "device is 'tpu TPU v5 lite' in the bundle and 'cpu cpu' here"),
        (("sources",), "old", "sources is 'old' in the bundle"),
        (("gone",), 1, "gone is 1 in the bundle and None here"),
    ],
)
def test_the_error_names_the_facts_that_differ(
    path: tuple[str, ...], value: object, why: str, whole: Path, tmp_path: Path
) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        facts = manifest["facts"]
        for name in path[:-1]:
            facts = facts[name]
        facts[path[-1]] = value

    folder = _edited(whole, tmp_path, edit)
    with pytest.raises(ConfigError) as refused:
        load_bundle(folder, read_manifest(folder), BundlePart("", builder(), [UPDATE_KEY]))
    assert why in str(refused.value)
    assert f"jaxserve compile --output {folder}" in str(refused.value)


def test_another_deployment_is_refused(whole: Path) -> None:
    other = builder(msgspec.structs.replace(CAPACITY, decode_buckets=(4,)))
    with pytest.raises(ConfigError, match=r"sizes.decode_buckets is \[2, 4\] in the bundle and \[4\] here"):
        load_bundle(whole, read_manifest(whole), BundlePart("", other, [UPDATE_KEY]))


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_an_unreadable_program_is_refused(damage: str, whole: Path, tmp_path: Path) -> None:
    folder = _edited(whole, tmp_path, lambda manifest: None)
    if damage == "missing":
        program_path(folder, UPDATE_KEY).unlink()
    else:
        program_path(folder, UPDATE_KEY).write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"update\.xla can't be loaded"):
        load_bundle(folder, read_manifest(folder), BundlePart("", builder(), [UPDATE_KEY]))


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no bundle: manifest\.json can't be read"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no bundle"):
        read_manifest(tmp_path)
    with pytest.raises(ConfigError, match="has format 2"):
        read_manifest(_edited(whole, tmp_path, lambda manifest: manifest.update(format=2)))


def test_the_pool_size_is_that_of_the_bundle_unless_it_is_set(whole: Path) -> None:
    manifest = read_manifest(whole)
    assert sized_like_bundle(EngineConfig(), manifest).max_total_tokens == 80
    for size in ("max_total_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
        assert sized_like_bundle(config := EngineConfig(**{size: 16}), manifest) == config


def _as_for_target(manifest: dict[str, Any]) -> None:
    """Describe platform and compiler as a target does, and not as the attached device."""
    manifest["target"] = "nvidia-h200"
    manifest["facts"]["compiler"] = "NVIDIA H200"
    manifest["facts"]["attention"]["target"]["platform"] = "cuda"


def test_a_bundle_for_a_target_may_name_platform_and_compiler_differently(whole: Path, tmp_path: Path) -> None:
    folder = _edited(whole, tmp_path, _as_for_target)
    loaded = load_bundle(folder, read_manifest(folder), BundlePart("", builder(), [UPDATE_KEY]))
    assert loaded is not None
    assert list(loaded) == [UPDATE_KEY]
    other = builder(msgspec.structs.replace(CAPACITY, decode_buckets=(4,)))
    with pytest.raises(ConfigError, match=r"sizes.decode_buckets is .* --target nvidia-h200`"):
        load_bundle(folder, read_manifest(folder), BundlePart("", other, [UPDATE_KEY]))


def test_a_program_for_a_target_that_does_not_load_is_a_warning(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _edited(whole, tmp_path, _as_for_target)
    program_path(folder, UPDATE_KEY).write_bytes(b"x" * 100)
    assert load_bundle(folder, read_manifest(folder), BundlePart("", builder(), [UPDATE_KEY])) is None
    assert "compiling all programs on this device instead" in caplog.text


def test_parts_have_folders_of_their_own_and_their_own_facts(tmp_path: Path) -> None:
    other = builder(msgspec.structs.replace(CAPACITY, decode_buckets=(4,)))
    parts = [BundlePart("stage-0", builder(), [UPDATE_KEY]), BundlePart("stage-1", other, [UPDATE_KEY])]
    for part in parts:
        part.builder.store(builder().compile(UPDATE_KEY), program_path(tmp_path / part.name, UPDATE_KEY))
    write_manifest(tmp_path, EngineConfig(model="tiny", pp_size=2), parts)
    manifest = read_manifest(tmp_path)
    assert manifest.programs == ["stage-0/update", "stage-1/update"]
    for part in parts:
        assert list(load_bundle(tmp_path, manifest, part) or ()) == [UPDATE_KEY]
    with pytest.raises(
        ConfigError, match=r"stage-1 was made .* sizes.decode_buckets is \[4\] in the bundle and \[2, 4\]"
    ):
        load_bundle(tmp_path, manifest, BundlePart("stage-1", builder(), [UPDATE_KEY]))
    program_path(tmp_path / "stage-1", UPDATE_KEY).unlink()
    with pytest.raises(ConfigError, match=r"stage-1/update\.xla can't be loaded"):
        load_bundle(tmp_path, manifest, parts[1])


def test_a_bundle_of_another_number_of_stages_is_refused(whole: Path) -> None:
    config = EngineConfig(pp_size=2, programs=str(whole))
    with pytest.raises(ConfigError, match=r"was made for pp_size=1, and pp_size is 2: set --pp-size 1, or make it"):
        sized_like_bundle(config, read_manifest(whole))
