"""The tasks that are timed: a kernel's work on one problem, with each of some block sizes."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem, by the `facts` that its entry in a table has. `refusal` says why the backend doesn't solve it.

    `seconds` returns the time of a step on a target, whose `blocks` are the sizes to time.
    """

    kind: Kind
    facts: dict[str, Any]
    refusal: str | None
    candidates: list[dict[str, int]]
    seconds: Callable[[KernelTarget], float]

    def fastest(self, target: KernelTarget) -> dict[str, int] | None:
        """Time each candidate, print its time, and return the fastest, or None if none compiles."""
        timed: list[tuple[float, dict[str, int]]] = []
        for blocks in self.candidates:
            sizes = frozenset((self.kind, name, size) for name, size in blocks.items())
            try:
                seconds = self.seconds(dataclasses.replace(target, blocks=sizes))
            except Exception as error:  # compilers' errors have no common type
                print(f"{self.kind} {self.facts} {blocks}: {str(error).splitlines()[0][:100]}")
                continue
            timed.append((seconds, blocks))
            print(f"{self.kind} {self.facts} {blocks}: {seconds * 1e6:.1f} us", flush=True)
        return min(timed, key=lambda one: one[0])[1] if timed else None


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_array(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return random numbers: any of 8 bits, else normal ones. Constants take less power, which makes a GPU faster."""
    key = jax.random.key(0)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize == 1:
        return jax.random.bits(key, shape, jnp.uint8).astype(dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def seconds_a_step[State](step: Callable[[State], State], state: State, repeats: int) -> float:
    """Return the seconds of a step: the best of three runs of `repeats` steps, each with the state of the last."""
    state = step(state)
    jax.block_until_ready(state)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
            state = step(state)
        jax.block_until_ready(state)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best
