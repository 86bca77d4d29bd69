"""What one process has of its arrays, where it has all of them; parts of several processes are test_processes.py's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.devices.mesh import make_mesh
from jaxserve.runtime.execution.local_shard import bits_of, local_part, spans_processes
from jaxserve.runtime.step.state import ArraySpec

BF16 = np.dtype(jnp.bfloat16)


def test_the_only_process_has_all_of_it() -> None:
    mesh = make_mesh(jax.devices("cpu"))
    part = local_part(mesh, ArraySpec((1, 2, 4, 3), BF16, ("ranks", None, "kv_heads", None)))
    assert not spans_processes(mesh)
    assert (part.first, part.shape) == ((0,) * 4, (1, 2, 4, 3))
    rows = np.arange(24, dtype=np.float32).astype(BF16).reshape(part.shape)
    array = part.put(rows)
    assert array.sharding == part.sharding
    np.testing.assert_array_equal(np.asarray(array), rows)
    np.testing.assert_array_equal(part.get(array), rows.view(bits_of(BF16)))
    np.testing.assert_array_equal(np.asarray(part.put_own(rows)), rows)
