"""The fixtures of pooled requests (scripts/make_pooled.py), and vectors computed the naive way, for comparison."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import ServedCheckpoint, read_served_checkpoint
from jaxserve.layers.linear import linear
from jaxserve.model_source import ModelSource, resolve
from jaxserve.model_source.architectures import model_class_of
from jaxserve.model_source.fields import read_json
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import norm
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.parameters import PooledParams
from jaxserve.models.registry import abstract_params, family, forward, parse_model_config
from jaxserve.quant import Shards, choose_weights, hold_weights, method_of
from jaxserve.runtime.devices.mesh import make_mesh, partitions, shardings
from jaxserve.weights import build_params, open_weights, stored_types
from pallas_kernels.paged_attention import REFERENCE
from pallas_kernels.target import CPU
from tests.models.forward import empty_pools, whole_prompt

POOLED = Path(__file__).parents[1] / "fixtures" / "pooled"
_FOLDERS = sorted(path.name for path in POOLED.iterdir())
ENCODERS = [name for name in _FOLDERS if model_class_of(read_json(POOLED / name / "config.json"), name).bidirectional]
"""The fixtures of models that compute whole texts."""
FOLDERS = [name for name in _FOLDERS if name not in ENCODERS]
"""The fixtures of other models."""
SETTINGS: dict[str, dict[str, Any]] = {"qwen3_reranker": {"convert": "classify"}}
"""The settings that a fixture needs to be served for its task, by name."""
_SIZE = 128
_ACTIVATIONS: dict[str, Any] = {
    "none": lambda x: x,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A text or a pair, its ids, its vector before normalization and activation, and the normalized one if it is an
    embedding. If the model tells the texts of a pair apart, `second_start` is the first token of the second."""

    text: str
    second: str | None
    ids: list[int]
    vector: np.ndarray
    embedding: np.ndarray | None
    second_start: int | None


def pooled_source(name: str) -> ModelSource:
    """Return the files of a fixture."""
    return resolve(str(POOLED / name))


def expected(name: str) -> dict[str, Any]:
    """Return the content of a fixture's expected.json."""
    content: dict[str, Any] = json.loads((POOLED / name / "expected.json").read_text())
    return content


def cases(name: str) -> list[Case]:
    """Return the cases of a fixture."""
    return [
        Case(
            each["text"],
            each.get("second"),
            each["ids"],
            np.array(each["vector"], np.float32),
            _array(each.get("embedding")),
            each.get("second_start"),
        )
        for each in expected(name)["cases"]
    ]


def _array(numbers: list[float] | None) -> np.ndarray | None:
    return None if numbers is None else np.array(numbers, np.float32)


def served(source: ModelSource, **settings: Any) -> ServedCheckpoint:
    """Return what these settings serve."""
    return read_served_checkpoint(EngineConfig(model=str(source.path), **settings), source)


def vectors(
    source: ModelSource, found: ServedCheckpoint, prompts: list[list[int]], shards: int = 1, *, packed: bool = False
) -> list[np.ndarray]:
    """Return the vector of each prompt, on so many devices, in float32 or with weights that are packed for a CPU."""
    model: AnyModel = LaidOutModel(parse_model_config(found.raw, found.where, found.task), shards=shards)
    mesh, dtype = make_mesh(jax.devices("cpu"), tensor=shards), np.dtype(jnp.bfloat16 if packed else np.float32)
    dense = abstract = abstract_params(model, dtype)
    quantization = model.config.quantization
    if packed:
        stored = stored_types(source, model.config)
        method = method_of(quantization, stored)
        made = choose_weights("auto", dense, stored, method, target=CPU, dtype=dtype, shards=Shards(shards, shards))
        abstract = hold_weights(dense, made.forms)
    reader = open_weights(source, abstract, dense=dense, quantization=quantization)
    params = build_params(abstract, shardings(mesh, abstract), reader)
    parts = (partitions(abstract), PartitionSpec(), PartitionSpec())
    run = jax.jit(
        jax.shard_map(
            functools.partial(_vector, model), mesh=mesh, in_specs=parts, out_specs=PartitionSpec(), check_vma=False
        )
    )
    padded = [np.pad(np.array(ids, np.int32), (0, _SIZE - len(ids))) for ids in prompts]
    return [np.array(run(params, ids, np.int32(len(prompt)))) for ids, prompt in zip(padded, prompts)]


def pooled_difference(name: str, shards: int = 1) -> float:
    """Return the largest difference of any number of a fixture's vectors to the expected ones."""
    source, own = pooled_source(name), cases(name)
    found = vectors(source, served(source, **SETTINGS.get(name, {})), [case.ids for case in own], shards)
    return max(float(np.abs(vector - case.vector).max()) for vector, case in zip(found, own, strict=True))


def _vector(model: AnyModel, params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
    batch = whole_prompt(tokens, length, len(model.kv_specs()))
    kv = empty_pools(model, len(tokens), params.norm.dtype)
    hidden = forward(model, params, family(model).embed(model, params, batch), batch, kv, REFERENCE).hidden
    return pool(model.config, params.pooled, hidden, length)


def pool(config: ModelConfig, pooled: Sequence[PooledParams], hidden: jax.Array, length: jax.Array) -> jax.Array:
    """Return the vector of a text of so many tokens, of its hidden states and padding after them."""
    pooling = config.pooling
    assert pooling is not None
    kept = (jnp.arange(len(hidden)) < length)[:, None]
    x = {
        "mean": jnp.where(kept, hidden, 0).sum(axis=0) / length,
        "last": hidden[length - 1],
        "cls": hidden[0],
    }[pooling.method]
    for layer, weights in zip(pooling.layers, pooled, strict=True):
        x = linear(x[None], weights.weight, weights.bias, out_dtype=jnp.float32)[0, : layer.outputs]
        x = norm(_ACTIVATIONS[layer.activation](x), weights.norm, layer.norm_eps)
    return x
