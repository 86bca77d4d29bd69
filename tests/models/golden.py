"""Computes the logits of the golden fixtures on a mesh of this process' CPU devices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jaxserve.model_source import resolve
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family, parse_model_config
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.weights.arrays import build_params
from jaxserve.weights.open import open_weights
from pallas_kernels.paged_attention import REFERENCE, Backend
from tests.models.forward import prompt_logits

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir())


def folder_of(name: str) -> Path:
    """Return the folder of a fixture; names of quantized ones begin with `quantized/`."""
    return GOLDEN.parent / name if name.startswith("quantized/") else GOLDEN / name


def golden_config(name: str) -> ModelConfig:
    """Return the config of a fixture."""
    return parse_model_config(json.loads((folder_of(name) / "config.json").read_text()))


def golden_logits(
    name: str, shards: int, backend: Backend = REFERENCE, *, ranks: int = 1, expert: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the logits of each prompt of a fixture, in float32 on `shards` devices, and those of Hugging Face.

    With several `ranks` of so many devices, which all compute the same, experts are divided among them, too. The
    devices of a rank are in `expert` groups.
    """
    folder = folder_of(name)
    config = dataclasses.replace(golden_config(name), shards=shards, experts_over_ranks=ranks > 1)
    mesh = make_mesh(jax.devices("cpu"), data=ranks, tensor=shards, expert=expert)
    abstract = family(config).abstract(config, np.dtype(np.float32))
    reader = open_weights(resolve(str(folder)), abstract, quantization=config.quantization)
    params = build_params(abstract, shardings(mesh, abstract), reader)
    golden = np.load(folder / "golden.npz")
    for i in range(3):
        ids = golden[f"ids_{i}"].tolist()
        # A dynamic rotation goes by the deployment's context; in Hugging Face, by the prompt's length if it exceeds 32.
        logits = prompt_logits(config.with_context(max(32, len(ids))), params, ids, size=64, mesh=mesh, backend=backend)
        yield logits, golden[f"logits_{i}"]
