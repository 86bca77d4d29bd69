from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.sampling import draw_tokens, reference
from pallas_kernels.sampling.parameters import DrawParameters


@pytest.mark.parametrize("draw", [draw_tokens, reference.draw_tokens], ids=["cpu", "xla"])
def test_rows_that_are_not_live_get_0(draw: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 100)).astype(np.float32)
    keys, temperature = rng.integers(0, 2**32, (6, 2), np.uint32), np.array([0, 1, 1, 0, 1, 1], np.float32)
    given = (
        logits,
        keys,
        DrawParameters(temperature, np.zeros(6, np.int32), np.ones(6, np.float32), np.zeros(6, np.float32)),
    )
    expected = jax.jit(draw)(*given)
    assert (np.asarray(expected) != 0).all()
    live = np.array([True, False, True, True, False, False])
    np.testing.assert_array_equal(jax.jit(draw)(*given, live), np.where(live, expected, 0))
