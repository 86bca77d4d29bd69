"""Small real checkpoints for tests: arrays in memory as a source, random checkpoints, converted folders."""

from __future__ import annotations

import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.model_source import ModelSource, read_config, resolve
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import ParamSpec, TensorPart, Window
from jaxserve.weights import TensorInfo, build_params, open_weights
from jaxserve.weights.arrays import flatten
from jaxserve.weights.convert import convert

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


class MemorySource:
    """A checkpoint in memory that counts the elements that are read."""

    def __init__(self, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        self.tensors = tensors
        self.elements_read = dict.fromkeys(tensors, 0)
        self.first_reads: dict[int, list[str]] = {}

    @property
    def description(self) -> str:
        return "a checkpoint in memory"

    @property
    def infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(array.shape, str(array.dtype)) for name, array in self.tensors.items()}

    def read(self, name: str, window: Window, out: np.ndarray[Any, Any]) -> None:
        if not self.elements_read[name]:
            self.first_reads.setdefault(threading.get_ident(), []).append(name)
        self.elements_read[name] += out.size
        out[...] = self.tensors[name][window]


def on_one_device(abstract: Any) -> Any:
    """Return a sharding for each parameter that puts it on the first device."""
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), abstract)


def spec(*shape: int, dtype: Any = np.float32, init: Any = "normal", scale: float = 0.02, **options: Any) -> ParamSpec:
    """Return the spec of a parameter whose axes don't matter."""
    return ParamSpec(shape, np.dtype(dtype), (None,) * len(shape), init, scale, **options)


def tensor_parts(abstract: Any) -> dict[str, TensorPart]:
    """Return the parts of a tree's parameters by the names of their tensors, none of them fused."""
    return {part.name: part for _, spec in flatten(abstract)[0] for part in spec.parts}


def random_checkpoint(abstract: Any, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return a random float32 tensor for each part of a tree's parameters, in Hugging Face's shape.

    A tensor with the weights of several heads, as `kv_b_proj` has, gets the rows of all of its parts.
    """
    rng = np.random.default_rng(seed)
    parts = [part for _, spec in flatten(abstract)[0] for part in spec.parts]
    sizes = Counter[str]()
    for part in parts:
        sizes[part.name] += math.prod(part.shape)
    tensors = {}
    for name, part in tensor_parts(abstract).items():
        last = name.rsplit(".", 2)[-2:]
        shape = part.shape if part.view is None else part.view.shape
        if last == ["o_proj", "weight"]:
            shape = (shape[0], math.prod(shape[1:]))
        elif name.endswith(".weight") and len(shape) > 1:
            shape = (sizes[name] // shape[-1], shape[-1])
        else:
            shape = (math.prod(shape),)
        tensors[name] = rng.standard_normal(shape, dtype=np.float32)
    return tensors


def load_model(source: ModelSource, dtype: Any = np.float32) -> Any:
    """Load the parameters of a model from files, as the engine does."""
    config = parse_model_config(read_config(source))
    abstract = abstract_params(LaidOutModel(config), np.dtype(dtype))
    return build_params(abstract, on_one_device(abstract), open_weights(source, abstract))


def converted(model: Path, target: Path, dtype: Any, quantization: Any = "auto") -> ModelSource:
    """Convert a model as `jaxserve convert` does, without its tokenizer."""
    target.mkdir()
    config = EngineConfig(model=str(model), dtype=np.dtype(dtype).name, quantization=quantization)
    convert(resolve(str(model)), config, target, lambda nbytes, total: None)
    return resolve(str(target))


def assert_same_params(left: Any, right: Any) -> None:
    """Assert that two trees have equal structures, types and bits."""
    assert str(jax.tree.structure(left)) == str(jax.tree.structure(right))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
