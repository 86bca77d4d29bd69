from __future__ import annotations

import dataclasses
import math
import threading
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import flax.struct
import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import read_config, resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import TensorPart, Window
from jaxserve.weights import TensorInfo, build_params, mismatch, open_source
from jaxserve.weights.arrays import flatten
from jaxserve.weights.load import check_names, checkpoint_reader
from jaxserve.weights.open import is_ignored
from tests.weights.conftest import GOLDEN, MemorySource, on_one_device, spec
from tests.weights.quantized.fixtures import QUANTIZED

MODELS = [
    *sorted(path.parent for path in GOLDEN.glob("*/config.json")),
    *(QUANTIZED / name for name in ("gpt_oss_mxfp4", "gptq_phi3", "mixtral_awq", "fp8_blocks")),
]


@flax.struct.dataclass
class Layer:
    qkv: Any
    norm: Any
    bias: Any


def load_params(abstract: Any, source: MemorySource, **options: Any) -> Any:
    """Load a tree from a checkpoint onto the first device."""
    reader = checkpoint_reader(abstract, source, **options)
    return build_params(abstract, on_one_device(abstract), reader)


def tiny(dtype: Any = np.float32, layers: int = 2) -> Any:
    """Return layers of a fused qkv [kv heads, group + 2, head, dim], a norm and no bias, as in the Llama family."""

    def layer(i: int) -> Layer:
        qkv = [
            TensorPart(f"{i}.{name}", (2, members, 3, 5), (0, start, 0, 0))
            for name, members, start in (("q", 2, 0), ("k", 1, 2), ("v", 1, 3))
        ]
        norm = TensorPart(f"{i}.norm", (5,), (0,))
        return Layer(
            spec(2, 4, 3, 5, dtype=dtype, inputs=1, parts=tuple(qkv)), spec(5, dtype=dtype, parts=(norm,)), None
        )

    return {"layers": tuple(layer(i) for i in range(layers))}


def tiny_tensors(rng: np.random.Generator, layers: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {"q": (12, 5), "k": (6, 5), "v": (6, 5), "norm": (5,)}
    return {
        f"{i}.{name}": rng.standard_normal(shape).astype(np.float32)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def test_fused_pieces_are_written_where_their_mappings_say(rng: np.random.Generator) -> None:
    abstract = tiny()
    tensors = tiny_tensors(rng)
    params = load_params(abstract, MemorySource(tensors))
    for i in range(2):
        q, k, v = (tensors[f"{i}.{name}"].reshape(2, -1, 3, 5) for name in "qkv")
        layer = params["layers"][i]
        np.testing.assert_array_equal(np.asarray(layer.qkv), np.concatenate([q, k, v], axis=1))
        np.testing.assert_array_equal(np.asarray(layer.norm), tensors[f"{i}.norm"])
        assert layer.bias is None


def test_a_tensor_may_be_spread_within_rows(rng: np.random.Generator) -> None:
    """Pieces along the last dimensions: no window has the tensor's layout, so rows are copied one by one."""
    places = TensorPart("a", (4, 2, 1, 5), (0, 0, 0, 0)), TensorPart("b", (4, 2, 2, 5), (0, 0, 1, 0))
    abstract = {"w": spec(4, 2, 3, 5, parts=places)}
    tensors = {
        "a": rng.standard_normal((4, 10)).astype(np.float32),
        "b": rng.standard_normal((4, 20)).astype(np.float32),
    }
    params = load_params(abstract, MemorySource(tensors))
    expected = np.concatenate([tensors["a"].reshape(4, 2, 1, 5), tensors["b"].reshape(4, 2, 2, 5)], axis=2)
    np.testing.assert_array_equal(np.asarray(params["w"]), expected)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_values_are_rounded_once_to_the_type_of_the_spec(rng: np.random.Generator, stored: Any, wanted: Any) -> None:
    abstract = tiny(wanted)
    tensors = {name: array.astype(stored) for name, array in tiny_tensors(rng).items()}
    params = load_params(abstract, MemorySource(tensors))
    loaded = np.asarray(params["layers"][1].norm)
    assert loaded.dtype == wanted
    np.testing.assert_array_equal(loaded, tensors["1.norm"].astype(wanted))


def test_parameters_are_read_in_the_order_of_the_file(rng: np.random.Generator) -> None:
    abstract = tiny(layers=6)
    names = ("norm", "k", "q", "v")
    tensors = tiny_tensors(rng, layers=6)
    source = MemorySource({f"{i}.{name}": tensors[f"{i}.{name}"] for i in reversed(range(6)) for name in names})
    load_params(abstract, source)
    position = {name: i for i, name in enumerate(source.infos)}
    assert source.first_reads
    for names_read in source.first_reads.values():  # each thread reads in the file's order
        places_read = [position[name] for name in names_read]
        assert places_read == sorted(places_read)


class WatchedSource(MemorySource):
    """A checkpoint that counts the parameters whose reading has begun but not finished."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], paths: dict[str, int]) -> None:
        super().__init__({name: np.broadcast_to(np.float32(1), shape) for name, shape in shapes.items()})
        self.left = dict.fromkeys(paths.values(), 0)
        for name, path in paths.items():
            self.left[path] += math.prod(shapes[name])
        self.paths = paths
        self.begun: set[Any] = set()
        self.most_begun = 0
        self.lock = threading.Lock()

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        path = self.paths[name]
        with self.lock:
            self.begun.add(path)
            self.most_begun = max(self.most_begun, len(self.begun))
        super().read(name, window, out)
        with self.lock:
            self.left[path] -= out.size
            if not self.left[path]:
                self.begun.remove(path)


def test_at_most_two_tensors_are_held_besides_the_destination() -> None:
    """Even if the file has all of q before the first k, and k before v."""
    layers, heads, head, dim = 24, 4, 16, 512
    parts = [
        [TensorPart(f"{x}{i}", (heads, 1, head, dim), (0, at, 0, 0)) for at, x in enumerate("qkv")]
        for i in range(layers)
    ]
    abstract = tuple(spec(heads, 3, head, dim, parts=tuple(own)) for own in parts)
    shapes = {f"{name}{i}": (heads * head, dim) for name in "qkv" for i in range(layers)}
    shardings = on_one_device(abstract)
    jax.block_until_ready(jax.device_put(np.ones(64, np.float32), shardings[0]))
    peaks = []
    for _ in range(3):  # what other threads of this process allocate meanwhile counts too
        source = WatchedSource(shapes, {part.name: i for i, own in enumerate(parts) for part in own})
        tracemalloc.start()
        try:
            params = load_params(abstract, source)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert not any(source.left.values())
        assert source.most_begun <= 2
    destination = sum(array.nbytes for array in params)
    assert min(peaks) <= destination + 2 * params[0].nbytes / 3
    assert all((np.asarray(array) == 1).all() for array in params)


class _Unreadable(MemorySource):
    @property
    def infos(self) -> dict[str, TensorInfo]:
        infos = super().infos
        return infos | {"0.q": TensorInfo(infos["0.q"].shape, "F8_E4M3", "type F8_E4M3 is not supported")}


def refused(source: MemorySource, layers: int = 2, **options: Any) -> str:
    abstract = tiny(layers=layers)
    with pytest.raises(ConfigError) as caught:
        load_params(abstract, source, **options)
    assert not any(source.elements_read.values()), "something was read before the names were checked"
    return str(caught.value)


def test_all_mismatches_are_named_at_once(rng: np.random.Generator) -> None:
    tensors = tiny_tensors(rng)
    del tensors["1.v"]
    tensors["extra.b"] = tensors["extra.a"] = np.zeros(3, np.float32)
    tensors["1.norm"] = np.zeros(6, np.float32)
    tensors["0.k"] = tensors["0.k"].T
    message = refused(_Unreadable(tensors))
    assert "a checkpoint in memory" in message
    assert "1 tensor is missing: 1.v" in message
    assert "2 tensors are left over (this model has no place for them): extra.a, extra.b" in message
    assert "0.k [5, 6] instead of [6, 5], 1.norm [6] instead of [5]" in message
    assert "0.q (type F8_E4M3 is not supported)" in message


def test_long_lists_of_names_end_in_a_count(rng: np.random.Generator) -> None:
    message = refused(MemorySource(tiny_tensors(rng, layers=1)), layers=9)
    assert "32 tensors are missing: 1.k, 1.norm, 1.q, 1.v, 2.k, 2.norm, 2.q, 2.v, 3.k, 3.norm and 22 more" in message


def test_ignored_tensors_are_not_left_over(rng: np.random.Generator) -> None:
    abstract = tiny()
    source = MemorySource(tiny_tensors(rng) | {"inv_freq": np.zeros(3, np.float32)})
    assert "inv_freq" in refused(source)
    load_params(abstract, source, ignored=lambda name: name == "inv_freq")
    assert source.elements_read["inv_freq"] == 0


def test_parts_that_leave_a_gap_are_an_assertion_error(rng: np.random.Generator) -> None:
    abstract = tiny()
    first, *others = abstract["layers"]
    gap = dataclasses.replace(first.qkv, parts=first.qkv.parts[:2])
    abstract = {"layers": (first.replace(qkv=gap), *others)}
    tensors = tiny_tensors(rng)
    del tensors["0.v"]
    with pytest.raises(AssertionError, match=r"layers\.0\.qkv"):
        load_params(abstract, MemorySource(tensors))


def test_an_error_while_reading_reaches_the_caller(rng: np.random.Generator) -> None:
    class Broken(MemorySource):
        def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
            raise OSError(f"disk error at {name}")

    abstract = tiny()
    with pytest.raises(OSError, match="disk error"):
        load_params(abstract, Broken(tiny_tensors(rng)))


def test_on_a_cpu_the_array_is_the_buffer_that_was_filled(rng: np.random.Generator) -> None:
    class Pointers(MemorySource):
        def __init__(self, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
            super().__init__(tensors)
            self.pointers: dict[str, int] = {}

        def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
            self.pointers[name] = out.ctypes.data
            super().read(name, window, out)

    abstract = tiny()
    source = Pointers(tiny_tensors(rng))
    params = load_params(abstract, source)
    if jax.devices()[0].platform != "cpu":
        pytest.skip("the first device is not a CPU")
    assert params["layers"][0].norm.unsafe_buffer_pointer() == source.pointers["0.norm"]


@dataclasses.dataclass(frozen=True)
class _Described:
    """A checkpoint of which only names and shapes are asked for."""

    infos: Mapping[str, TensorInfo]
    description: str = "a checkpoint"

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        raise AssertionError(name)


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_a_wrong_shape_is_shown_beside_that_of_the_file(folder: Path) -> None:
    """Each tensor's, as its file holds it: not in the parts or the order of a parameter."""
    source = resolve(str(folder))
    model = parse_model_config(read_config(source))
    right = open_source(source, quantization=model.quantization).infos
    wrong = {name: dataclasses.replace(info, shape=(*info.shape[:-1], 7)) for name, info in right.items()}
    specs = [spec for _, spec in flatten(abstract_params(LaidOutModel(model), np.dtype(np.float32)))[0]]
    used = check_names(_Described(right), specs, is_ignored)
    with mock.patch.object(mismatch, "_NAMES_SHOWN", len(right)), pytest.raises(ConfigError) as caught:
        check_names(_Described(wrong), specs, is_ignored)
    for name in used:
        assert f"{name} {list(wrong[name].shape)} instead of {list(right[name].shape)}" in str(caught.value)


@pytest.mark.parametrize("name", ["score.weight", "cls.predictions.bias", "classifier.weight", "dense.bias"])
def test_a_head_that_the_task_does_not_need_is_ignored(name: str) -> None:
    assert is_ignored(name)
    assert not is_ignored(f"model.layers.0.{name}")
