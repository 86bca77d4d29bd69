"""Products with quantized weights: the linear layers of common models, with few rows and with many."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.quantized_matmul import BACKENDS, QuantizedWeight, Scheme, make_weight, quantized_matmul
from pallas_kernels.quantized_matmul.tuning import facts
from pallas_kernels.target import KernelTarget
from pallas_kernels.tune.task import Task, random_array, seconds_a_step
from pallas_kernels.tuning import Kind

# (outputs, inputs) of qkv, output, gate and up, down: Llama 8B, and one of four shards of a 70B.
SHAPES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168),
)  # fmt: skip
SCHEMES = (
    Scheme("int4", 128, zeros=True),
    Scheme("int4", 128),
    Scheme("int8", 128),
    Scheme("int8"),
    Scheme("fp8", 128, activations="group"),
)
ROWS: dict[Kind, int] = {"decode": 16, "prefill": 2048}
TINY_ROWS: dict[Kind, int] = {"decode": 2, "prefill": 80}
# The number of weights that are read in turn, so that a cache has none of them.
_TURNS = 8


def tasks(backend: BackendName, target: KernelTarget, *, tiny: bool) -> Iterator[Task]:
    """Yield the tasks to time; with `tiny`, those that interpret mode computes in seconds."""
    module: Any = BACKENDS.module(backend)
    shapes, schemes = (((128, 256),), (SCHEMES[0],)) if tiny else (SHAPES, SCHEMES)
    for shape, scheme, (kind, rows) in itertools.product(shapes, schemes, (TINY_ROWS if tiny else ROWS).items()):
        yield Task(
            kind,
            facts(*shape, scheme),
            BACKENDS.refusal(backend, target, (*shape, scheme)),
            module.candidates(kind)[: 2 if tiny else None],
            functools.partial(_seconds, backend, shape, scheme, rows, 1 if tiny else _TURNS),
        )


def _seconds(
    backend: BackendName, shape: tuple[int, int], scheme: Scheme, rows: int, turns: int, target: KernelTarget
) -> float:
    weights = [make_weight(shape, scheme, Backend(backend, target), random_array) for _ in range(turns)]

    @jax.jit
    def multiply(x: jax.Array, weights: list[QuantizedWeight]) -> jax.Array:
        for weight in weights:
            # The next product waits for this one.
            out = quantized_matmul(x, weight, out_dtype=x.dtype, one_pass=True)
            x = x + out[:, :1] * jnp.asarray(1e-6, x.dtype)
        return x

    x = random_array((rows, shape[1]), jnp.bfloat16)
    return seconds_a_step(lambda x: multiply(x, weights), x, turns) / turns
