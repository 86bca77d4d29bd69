"""Computes rows a group at a time, and only as many groups as hold rows that are needed."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int


def in_groups[Given, Found](
    compute: Callable[[Given, Int[Array, ""]], Found], rows: Given, num_rows: Int[Array, ""], size: int
) -> Found:
    """Return `compute(some, count)` of all `rows`, `size` at a time, of which the first `count` are needed.

    The first `num_rows` are needed; other rows may be computed or 0. If the last group isn't whole, it also has rows of
    the one before.
    """
    total = len(jax.tree.leaves(rows)[0])

    def group(start: Array | int) -> Found:
        start = jnp.minimum(start, total - size)
        some = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), rows)
        return compute(some, jnp.minimum(num_rows - start, size))

    empty = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), jax.eval_shape(lambda: group(0)))
    if size == total:
        found: Found = lax.cond(num_rows > 0, lambda: group(0), lambda: empty)
        return found

    def body(i: Array, filled: Found) -> Found:
        start = jnp.minimum(i * size, total - size)
        return jax.tree.map(
            lambda all_rows, some: lax.dynamic_update_slice_in_dim(all_rows, some, start, axis=0), filled, group(start)
        )

    return lax.fori_loop(0, (num_rows + size - 1) // size, body, empty)
