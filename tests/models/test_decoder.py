"""The layers of a model, run as a whole and in ranges."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.models.decoder import apply_layers, norm
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, family, forward
from jaxserve.runtime.devices.mesh import partitions, shardings
from jaxserve.weights.dummy import dummy_params
from pallas_kernels.paged_attention import REFERENCE
from tests.models.forward import cpu_mesh, empty_pools, whole_prompt
from tests.models.golden import golden_config

SIZE = 21


def _run(name: str, compute: Any) -> Any:
    """Return what `compute(model, params, x, batch, kv)` returns for a prompt of a golden model."""
    model = LaidOutModel(golden_config(name))
    abstract = abstract_params(model, np.dtype(np.float32))
    params = dummy_params(abstract, shardings(cpu_mesh(), abstract), seed=0)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, SIZE)

    def run(params: Any, tokens: jax.Array) -> Any:
        kv = empty_pools(model, SIZE)
        batch = whole_prompt(tokens, jnp.int32(SIZE), len(kv))
        return compute(model, params, family(model).embed(model, params, batch), batch, kv)

    specs, whole = (partitions(abstract), PartitionSpec()), PartitionSpec()
    mapped = jax.shard_map(run, mesh=cpu_mesh(), in_specs=specs, out_specs=whole, check_vma=False)
    return jax.jit(mapped)(params, jnp.array(tokens, jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "olmo2", "glm4_moe"])
def test_two_ranges_of_layers_are_the_whole(name: str) -> None:
    """The features that a head gets from a family are the inputs of layers: what ranges that end there return."""

    def compute(model: Any, params: Any, x: Any, batch: Any, kv: Any) -> Any:
        layers = model.config.num_layers
        asked, middle = dataclasses.replace(model, taps=tuple(range(layers))), layers // 2
        whole = forward(asked, params, x, batch, kv, REFERENCE)
        apply = family(model).layers(model, params, x, batch, REFERENCE)
        first = apply_layers(model, apply, params.layers[:middle], x, kv, range(middle))
        last = apply_layers(asked, apply, params.layers[middle:], first.hidden, first.kv, range(middle, layers))
        hidden = norm(last.hidden, params.norm, model.config.norm_eps)
        loads = [part.expert_tokens for part in (first, last) if part.expert_tokens is not None]
        parts = hidden, last.kv, jnp.concatenate(loads) if loads else None, (x, first.hidden, last.features)
        features = whole.features[0], whole.features[middle], whole.features[middle:]
        return (whole.hidden, whole.kv, whole.expert_tokens, features), parts

    whole, parts = _run(name, compute)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert np.abs(whole[0]).min() > 0
