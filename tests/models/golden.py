"""Computes the logits of the golden fixtures on a mesh of this process' CPU devices."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxserve.model_source import ModelSource, read_config, resolve
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.weights.arrays import build_params
from jaxserve.weights.open import open_weights
from pallas_kernels.paged_attention import REFERENCE, Backend
from tests.models.forward import prompt_logits
from tests.weights.gguf_converter import from_golden

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir())


def folder_of(name: str) -> Path:
    """Return the folder of a fixture; names of quantized ones begin with `quantized/`."""
    name = name.removeprefix("gguf:")
    return GOLDEN.parent / name if name.startswith("quantized/") else GOLDEN / name


@functools.cache
def source_of(name: str) -> ModelSource:
    """Return the files of a fixture; with `gguf:` before its name, a GGUF file that is made of it."""
    if not name.startswith("gguf:"):
        return resolve(str(folder_of(name)))
    folder = Path(tempfile.mkdtemp(prefix="jaxserve-gguf-"))
    atexit.register(shutil.rmtree, folder)
    return ModelSource(from_golden(folder_of(name), folder / "model.gguf"), "gguf", name)


def golden_config(name: str) -> ModelConfig:
    """Return the config of a fixture."""
    return parse_model_config(read_config(source_of(name)))


def golden_logits(
    name: str, shards: int, backend: Backend = REFERENCE, *, ranks: int = 1, expert: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the logits of each prompt of a fixture, in float32 on `shards` devices, and those of Hugging Face.

    With several `ranks` of so many devices, which all compute the same, experts are divided among them, too. The
    devices of a rank are in `expert` groups.
    """
    folder = folder_of(name)
    model = LaidOutModel(golden_config(name), shards=shards, experts_over_ranks=ranks > 1)
    mesh = make_mesh(jax.devices("cpu"), data=ranks, tensor=shards, expert=expert)
    abstract = abstract_params(model, np.dtype(np.float32))
    reader = open_weights(source_of(name), abstract, quantization=model.config.quantization)
    params = build_params(abstract, shardings(mesh, abstract), reader)
    golden = np.load(folder / "golden.npz")
    for i in range(3):
        ids = golden[f"ids_{i}"].tolist()
        # A dynamic rotation goes by the deployment's context; in Hugging Face, by the prompt's length if it exceeds 32.
        stretched = dataclasses.replace(model, context=max(32, len(ids)))
        logits = prompt_logits(stretched, params, ids, size=64, mesh=mesh, backend=backend)
        yield logits, golden[f"logits_{i}"]
