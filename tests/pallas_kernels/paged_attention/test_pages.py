from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import PagedKV, kv_layout, read_pages, write_pages

LAYERS, PAGES, SIZE = 3, 5, 4
# A plain pool, a page-major one with keys and values joined, and a page-major one.
LAYOUTS = {"plain": ("cpu", 16), "joined": ("tpu", 64), "by pages": ("tpu", 128)}


def _pool(name: str, seed: int) -> PagedKV:
    platform, head_dim = LAYOUTS[name]
    layout = kv_layout(
        num_layers=LAYERS,
        num_pages=PAGES,
        page_size=SIZE,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=np.dtype(jnp.bfloat16),
        platform=platform,
    )
    rng = np.random.default_rng(seed)
    keys, values = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in (layout.shape, layout.values_shape)
    )
    return layout.paged_kv(keys, values)


def _page(kv: PagedKV, which: int, page: int) -> np.ndarray:
    """Return a page of one array, layer by layer, by the definition of its layout."""
    pool = np.asarray(kv.pools[which], np.float32)
    pool = pool if kv.page_major else pool.swapaxes(0, 1)
    return np.stack([pool[layer * PAGES + page] for layer in range(LAYERS)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_page_is_read_over_all_layers(name: str) -> None:
    kv = _pool(name, 0)
    rows = read_pages(kv, jnp.asarray([3, -1, 0]))
    assert len(rows) == len(kv.pools)
    for which, row in enumerate(rows):
        np.testing.assert_array_equal(np.asarray(row[0], np.float32), _page(kv, which, 3))
        np.testing.assert_array_equal(np.asarray(row[2], np.float32), _page(kv, which, 0))


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_are_written_elsewhere_and_nothing_else_changes(name: str) -> None:
    source, target = _pool(name, 0), _pool(name, 1)
    written = write_pages(target, jnp.asarray([4, -1, 1]), read_pages(source, jnp.asarray([3, 2, 0])))
    came_from = {4: (source, 3), 1: (source, 0)}
    for which in range(len(target.pools)):
        for page in range(PAGES):
            kv, of = came_from.get(page, (target, page))
            np.testing.assert_array_equal(_page(written, which, page), _page(kv, which, of))
    assert written.values is target.values or not target.joined


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_pages_of_a_pool_without_layers_hold_nothing(platform: str) -> None:
    layout = kv_layout(
        num_layers=0, num_pages=5, page_size=8, num_kv_heads=2, head_dim=16, dtype=np.dtype("f4"), platform=platform
    )
    kv = layout.paged_kv(*(jnp.zeros(shape, layout.dtype) for shape in (layout.shape, layout.values_shape)))
    rows = read_pages(kv, jnp.asarray([3, -1]))
    assert [row.size for row in rows] == [0] * len(kv.pools)
    after = write_pages(kv, jnp.asarray([4, -1]), rows)
    assert [pool.shape for pool in after.pools] == [pool.shape for pool in kv.pools]
