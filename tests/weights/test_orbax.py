from __future__ import annotations

import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import CHECKPOINT_FILE, ModelSource, resolve
from jaxserve.params import ParamSpec
from jaxserve.text.tokenizers.save import save_tokenizer
from jaxserve.weights import orbax, orbax_write
from jaxserve.weights.arrays import WeightReader, flatten
from jaxserve.weights.convert import convert
from jaxserve.weights.manifest import PARAMS_FOLDER, write_manifest
from jaxserve.weights.orbax import OrbaxCheckpoint
from jaxserve.weights.orbax_write import chunk_shape, write_checkpoint
from tests.models.pooled import SETTINGS, cases, pooled_source, served, vectors
from tests.selection import examples
from tests.weights.conftest import GOLDEN, assert_same_params, converted, load_model, spec

FAMILIES = ["llama2", "llama_sharded", "mistral", "qwen2", "qwen3", "smollm2"]
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model. Tests that change it use `copied`."""
    return converted(GOLDEN / "qwen2", tmp_path_factory.mktemp("orbax") / "qwen", np.float32).path


@pytest.fixture
def copied(qwen: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen, tmp_path / "copy"))


def refused(folder: Path, dtype: Any = np.float32) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelSource(folder, "orbax", "m"), dtype)
    return str(caught.value)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_converted_model_has_the_parameters_it_had(name: str, tmp_path: Path) -> None:
    source = ModelSource(GOLDEN / name, "folder", name)
    target = converted(source.path, tmp_path / "converted", np.float32)
    assert target.kind == "orbax"
    assert_same_params(load_model(target), load_model(source))


@pytest.mark.parametrize("name", ["llama_mean_dense", "qwen2_reward", "qwen3_reranker"])
def test_a_converted_folder_has_the_same_task_and_layers_after_pooling(name: str, tmp_path: Path) -> None:
    source = pooled_source(name)
    folder = tmp_path / "converted"
    folder.mkdir()
    settings = SETTINGS.get(name, {})
    save_tokenizer(source, folder)
    convert(source, EngineConfig(dtype="float32", **settings), folder, lambda done, total: None)
    target = resolve(str(folder))
    before, after = served(source, **settings), served(target, **settings)
    [ids, *_] = [case.ids for case in cases(name)]
    assert after.task == before.task
    assert target.kind == "orbax"
    np.testing.assert_array_equal(vectors(target, after, [ids]), vectors(source, before, [ids]))


def test_it_is_rounded_to_the_requested_type_and_loads_only_as_that(tmp_path: Path) -> None:
    source = ModelSource(GOLDEN / "smollm2", "folder", "m")
    target = converted(source.path, tmp_path / "converted", BF16)
    assert_same_params(load_model(target, BF16), load_model(source, BF16))
    message = refused(target.path)
    assert "of another type than --dtype float32: embedding (bfloat16), layers.0." in message
    assert "Start with --dtype bfloat16, or convert the model again with --dtype float32" in message


def test_orbax_itself_restores_it(qwen: Path) -> None:
    restored = ocp.PyTreeCheckpointer().restore(qwen / PARAMS_FOLDER)
    params = load_model(ModelSource(qwen, "orbax", "m"))
    leaves, _ = flatten(params)
    for path, array in leaves:
        stored = restored
        for name in path:
            stored = stored[str(name)]
        np.testing.assert_array_equal(stored, np.asarray(array))
    assert len(jax.tree.leaves(restored)) == len(leaves)


def test_parameters_that_are_missing_or_left_over_are_named(copied: Path) -> None:
    edit(copied / "config.json", lambda config: config.update(num_hidden_layers=config["num_hidden_layers"] + 1))
    assert (
        "7 tensors are missing: layers.2.attention.output, layers.2.attention.qkv, layers.2.attention.qkv_bias"
        in refused(copied)
    )
    edit(copied / "config.json", lambda config: config.update(num_hidden_layers=1))
    message = refused(copied)
    assert "left over (this model has no place for them): layers.1." in message
    assert "Check that config.json and the checkpoint belong together" in message


def test_parameters_of_another_shape_are_named(copied: Path) -> None:
    edit(copied / "config.json", lambda config: config.update(vocab_size=config["vocab_size"] - 1))
    message = refused(copied)
    assert "2 tensors are of the wrong shape: " in message
    assert "embedding [128, 32] instead of [127, 32]" in message


def test_a_folder_that_was_copied_in_part_names_the_missing_files(copied: Path) -> None:
    files = sorted(path for path in (copied / PARAMS_FOLDER).rglob("*") if path.is_file() and path.stat().st_size > 100)
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:50])
    message = refused(copied)
    assert f"files missing: {files[0].relative_to(copied)};" in message
    assert f"files of another size: {files[1].relative_to(copied)} (50 bytes instead of " in message
    assert "Copy it again" in message


def test_zeros_are_stored(tmp_path: Path) -> None:
    """By default TensorStore doesn't store chunks that hold only zeros."""
    abstract = {"w": spec(8, 8)}

    def fill(path: Any, spec: Any, window: Any, out: np.ndarray[Any, Any]) -> None:
        out.fill(0)

    parameters = write_checkpoint(tmp_path, abstract, WeightReader(fill, (0,)), lambda nbytes: None)
    write_manifest(tmp_path, version="1", model="m", parameters=parameters)
    out = np.ones((8, 8), np.float32)
    OrbaxCheckpoint(tmp_path).reader(abstract).fill(("w",), abstract["w"], (slice(0, 8), slice(0, 8)), out)
    assert not out.any()


def test_a_file_that_is_cut_short_after_it_was_checked_is_named(copied: Path) -> None:
    reader = OrbaxCheckpoint(copied)
    path = copied / PARAMS_FOLDER / "norm" / "0"
    path.write_bytes(path.read_bytes()[:-4])
    out = np.empty(32, np.float32)
    with pytest.raises(ConfigError, match=r"norm/0: norm can't be read \(.*copy the folder again"):
        reader._fill(("norm",), spec(32), (slice(0, 32),), out)


def test_a_parameter_that_was_never_written_is_named(copied: Path) -> None:
    edit(
        copied / CHECKPOINT_FILE,
        lambda manifest: manifest["parameters"].update(extra={"shape": [2], "dtype": "float32", "chunks": [2]}),
    )
    checkpoint = OrbaxCheckpoint(copied)
    with pytest.raises(ConfigError, match="1 tensor is missing: other"):
        checkpoint.reader({"extra": spec(2), "other": spec(3)})
    reader = OrbaxCheckpoint(copied)
    out = np.empty(2, np.float32)
    with pytest.raises(ConfigError, match="extra can't be read"):
        reader._fill(("extra",), spec(2), (slice(0, 2),), out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ('{"format": 1}', "can't be read"),
        ('{"format": 9, "jaxserve": "7.0", "model": "m", "parameters": {}, "files": {}}', "has format 9 .*reads 2"),
    ],
)
def test_a_manifest_that_is_damaged_or_too_new(copied: Path, content: str, message: str) -> None:
    (copied / CHECKPOINT_FILE).write_text(content)
    with pytest.raises(ConfigError, match=message):
        OrbaxCheckpoint(copied)


def test_chunks_are_pieces_of_the_axis_that_is_split() -> None:
    def chunks(*dims: tuple[int, str | None]) -> tuple[int, ...]:
        return chunk_shape(ParamSpec(tuple(size for size, _ in dims), BF16, tuple(axis for _, axis in dims)))

    dim = (8192, None)
    assert chunks(dim, (28672, "mlp")) == (8192, 28672 // 16)
    assert chunks((2, None), (28672, "mlp"), dim) == (2, 28672 // 16, 8192)
    assert chunks((128256, "vocab"), dim) == (128256 // 32, 8192), "no chunk is too large to be held in memory"
    assert chunks((50257, "vocab"), (1024, None)) == (3142, 1024), "the last one is smaller"
    assert chunks((8, "kv_heads"), (10, None), (128, None), dim) == (1, 10, 128, 8192)
    assert chunks(dim) == (8192,)
    assert chunks((64, "mlp"), (64, None)) == (64, 64), (
        "no chunk is so small that finding it takes longer than reading it"
    )
    assert chunks((4096, None), (32, "heads"), (128, None)) == (4096, 4, 128), (
        "at least a kilobyte of a row is contiguous"
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_a_shard_reads_little_more_than_its_own_bytes(
    axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_write, "_CHUNK_BYTES", (1 << 10, 1 << 20))
    monkeypatch.setattr(orbax_write, "_MIN_RUN_BYTES", 1 << 7)
    read = []
    fill_from_file = orbax._read_bytes

    def counted(file: int, at: int, out: np.ndarray[Any, Any]) -> None:
        read.append(out.nbytes)
        fill_from_file(file, at, out)

    monkeypatch.setattr(orbax, "_read_bytes", counted)
    axes = tuple("mlp" if at == axis else None for at in range(2))
    abstract = {"w": ParamSpec((256, 512), np.dtype(np.float32), axes)}
    values = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)

    def fill(path: Any, spec: Any, window: Any, out: np.ndarray[Any, Any]) -> None:
        out[...] = values[window]

    parameters = write_checkpoint(tmp_path, abstract, WeightReader(fill, (0,)), lambda nbytes: None)
    write_manifest(tmp_path, version="1", model="m", parameters=parameters)
    reader = OrbaxCheckpoint(tmp_path).reader(abstract)
    length = values.shape[axis] // 8
    window = tuple(slice(3 * length, 4 * length) if at == axis else slice(0, n) for at, n in enumerate(values.shape))
    out = np.empty(values[window].shape, np.float32)
    reader.fill(("w",), abstract["w"], window, out)
    np.testing.assert_array_equal(out, values[window])
    assert sum(read) == out.nbytes


@settings(max_examples=examples(60), derandomize=True)
@given(data=st.data())
def test_any_window_of_any_chunks_is_read(data: st.DataObject) -> None:
    """Reads into memory of any strides, rows that are wider or narrower than what is read at a time."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4), label="shape"))
    axis = data.draw(st.integers(0, len(shape) - 1), label="axis")
    pieces = data.draw(st.integers(1, shape[axis]), label="pieces")
    chunks = tuple(-(-size // pieces) if at == axis else size for at, size in enumerate(shape))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    window = tuple(slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax, "_BLOCK_BYTES", data.draw(st.sampled_from([4, 16, 64, 1 << 20]), label="block"))
        patch.setattr(orbax_write, "chunk_shape", lambda spec: chunks)
        folder = Path(name)
        abstract = {"w": spec(*shape)}

        def fill(path: Any, spec: Any, window: Any, out: np.ndarray[Any, Any]) -> None:
            out[...] = values[window]

        parameters = write_checkpoint(folder, abstract, WeightReader(fill, (0,)), lambda nbytes: None)
        write_manifest(folder, version="1", model="m", parameters=parameters)
        around = np.zeros([2 * (part.stop - part.start) for part in window], np.float32)
        out = around[tuple(slice(None, None, data.draw(st.sampled_from([1, 2]))) for _ in shape)]
        out = out[tuple(slice(0, part.stop - part.start) for part in window)]
        OrbaxCheckpoint(folder).reader(abstract).fill(("w",), abstract["w"], window, out)
    np.testing.assert_array_equal(out, values[window])


def test_few_parameters_are_held_while_it_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At most two being read, and two that TensorStore has not released yet."""
    abstract = {f"w{i}": spec(1 << 10, 1 << 10) for i in range(12)}
    done = []

    def fill(path: Any, spec: Any, window: Any, out: np.ndarray[Any, Any]) -> None:
        out.fill(1)

    write_checkpoint(tmp_path / "first", {"w": spec(2)}, WeightReader(fill, (0,)), done.append)  # imports and caches
    tracemalloc.start()
    try:
        write_checkpoint(tmp_path / "second", abstract, WeightReader(fill, tuple(range(12))), done.append)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done == [8, *[4 << 20] * 12]
    assert peak < 4.5 * done[-1]
    assert not caplog.records, "no warnings"
