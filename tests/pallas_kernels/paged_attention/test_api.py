"""The choice of a backend, and how much memory a pool takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import PagedKV, Problem, Target, choose_backend, kv_layout

PROBLEM = Problem(32, 8, 128, 16, np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16))


def test_the_choice_says_why() -> None:
    chosen = choose_backend(Target("cpu", "cpu"), PROBLEM)
    assert (chosen.name, chosen.reason, chosen.interpret) == ("reference", "the best for cpu", False)
    assert choose_backend(Target("tpu", "TPU v6 lite"), PROBLEM, "reference").reason == "asked for"


def test_a_backend_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fa3' is not built; available: reference, triton, mosaic_tpu"):
        choose_backend(Target("cuda", "NVIDIA H200", (9, 0)), PROBLEM, "fa3")


def test_a_pool_is_as_large_as_its_layout_says() -> None:
    layout = kv_layout(num_layers=3, num_pages=5, page_size=8, num_kv_heads=2, head_dim=16, dtype=jnp.bfloat16)
    kv = PagedKV(jnp.zeros(layout.shape, layout.dtype), jnp.zeros(layout.shape, layout.dtype), 3)
    assert kv.keys.nbytes + kv.values.nbytes == layout.nbytes == 5 * 8 * layout.bytes_per_token
    assert (kv.num_pages, kv.page_size) == (5, 8)
    assert layout.dtype == np.dtype(jnp.bfloat16)
    assert layout.axes[0] == "kv_heads"
