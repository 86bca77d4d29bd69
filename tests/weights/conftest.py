"""Small checkpoints that are made, not mocked: arrays in memory as a source, and placements of a fused layer."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.model_source import ModelSource, read_config, resolve
from jaxserve.models import registry
from jaxserve.models.config import parse_model_config
from jaxserve.params import ParamSpec, Placement, Window
from jaxserve.runtime.convert import convert
from jaxserve.weights import TensorInfo, build, open_weights

GOLDEN = Path(__file__).parent.parent / "fixtures" / "golden"


class MemorySource:
    """A checkpoint in memory that counts what is read of it."""

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
    """A sharding for each parameter: all of it on the first device."""
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), abstract)


def spec(*shape: int, dtype: Any = np.float32, init: Any = "normal", scale: float = 0.02) -> ParamSpec:
    """A parameter whose axes don't matter here."""
    return ParamSpec(shape, np.dtype(dtype), (None,) * len(shape), init, scale)


def random_checkpoint(placements: Mapping[str, Placement], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A float32 tensor for each placement, vectors and matrices as Hugging Face has them."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, placement in placements.items():
        last = name.rsplit(".", 2)[-2:]
        shape = placement.shape
        if last == ["o_proj", "weight"]:
            shape = (shape[0], math.prod(shape[1:]))
        elif name.endswith(".weight") and len(shape) > 1:
            shape = (math.prod(shape[:-1]), shape[-1])
        else:
            shape = (math.prod(shape),)
        tensors[name] = rng.standard_normal(shape, dtype=np.float32)
    return tensors


def load_model(source: ModelSource, dtype: Any = np.float32) -> Any:
    """Parameters of a real family from files, the way the engine gets them."""
    config = parse_model_config(read_config(source))
    abstract = registry.family(config).abstract(config, np.dtype(dtype))
    return build(abstract, on_one_device(abstract), open_weights(source, config, abstract))


def converted(model: Path, target: Path, dtype: Any) -> ModelSource:
    """A model as `jaxserve convert` writes it, but for its tokenizer."""
    target.mkdir()
    config = EngineConfig(model=str(model), dtype=np.dtype(dtype).name)
    convert(resolve(str(model)), config, target, lambda nbytes, total: None)
    return resolve(str(target))


def assert_same_params(left: Any, right: Any) -> None:
    """Equal trees, equal types, equal bits."""
    assert str(jax.tree.structure(left)) == str(jax.tree.structure(right))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right)):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
