"""The choice of a backend, and how much memory a pool takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import PagedKV, choose_backend, kv_layout


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_choice_says_why(platform: str) -> None:
    assert choose_backend(platform).name == "reference"
    assert platform in choose_backend(platform).reason
    assert choose_backend(platform, "reference").reason == "asked for"


def test_a_backend_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'fa3' is not built; available: reference"):
        choose_backend("cuda", "fa3")


def test_a_pool_is_as_large_as_its_layout_says() -> None:
    layout = kv_layout(num_layers=3, num_pages=5, page_size=8, num_kv_heads=2, head_dim=16, dtype=jnp.bfloat16)
    kv = PagedKV(jnp.zeros(layout.shape, layout.dtype), jnp.zeros(layout.shape, layout.dtype), 3)
    assert kv.keys.nbytes + kv.values.nbytes == layout.nbytes == 5 * 8 * layout.bytes_per_token
    assert (kv.num_pages, kv.page_size) == (5, 8)
    assert layout.dtype == np.dtype(jnp.bfloat16)
    assert layout.axes[0] == "kv_heads"
