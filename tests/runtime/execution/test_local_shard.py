"""The local shard of a single process is the whole array; test_processes.py tests those of several processes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.devices.mesh import make_mesh
from jaxserve.runtime.execution.local_shard import bits_of, local_shard, spans_processes
from jaxserve.runtime.step.state import ArraySpec

BF16 = np.dtype(jnp.bfloat16)


def test_a_single_process_has_the_whole_array() -> None:
    mesh = make_mesh(jax.devices("cpu"))
    shard = local_shard(mesh, ArraySpec((1, 2, 4, 3), BF16, ("ranks", None, "kv_heads", None)))
    assert not spans_processes(mesh)
    assert (shard.first, shard.shape) == ((0,) * 4, (1, 2, 4, 3))
    rows = np.arange(24, dtype=np.float32).astype(BF16).reshape(shard.shape)
    array = shard.put(rows)
    assert array.sharding == shard.sharding
    np.testing.assert_array_equal(np.asarray(array), rows)
    np.testing.assert_array_equal(shard.get(array), rows.view(bits_of(BF16)))
    np.testing.assert_array_equal(np.asarray(shard.put_from_whole(rows)), rows)
