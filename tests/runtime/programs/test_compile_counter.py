from __future__ import annotations

import jax
import numpy as np

from jaxserve.runtime.programs.compile_counter import CompileCounter


def test_compiles_are_counted() -> None:
    counter = CompileCounter()
    function = jax.jit(lambda x: x * 3 + 1)
    function(np.float32(1))
    first = counter.count
    function(np.float32(2))
    assert first >= 1
    assert counter.count == first
