from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxserve.layers.axes import sum_of_shards
from tests.models.forward import cpu_mesh


def test_one_shard_exchanges_nothing() -> None:
    alone = jax.shard_map(
        sum_of_shards, mesh=cpu_mesh(), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    x = jnp.arange(3, dtype=jnp.bfloat16)
    assert alone(x).tolist() == x.tolist()
    assert "psum" not in str(jax.make_jaxpr(alone)(x))
