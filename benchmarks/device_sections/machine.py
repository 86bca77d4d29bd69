"""The device's own rates, which are the references of all other sections."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from device_sections.run import SectionRun, seconds_per_call
from pallas_kernels.tune.task import random_array

COPY = "copy bandwidth"
MATMUL = "bf16 matmul rate"


def rates(run: SectionRun) -> None:
    """Measure a copy of half a gigabyte (read and written) and a large matrix product."""
    run.row("device", 1, "", note=run.device.device_kind)
    run.row("jax", 1, "", note=jax.__version__)
    size = 2**20 if run.tiny else 2**29
    copy = jax.jit(lambda x: x + jnp.bfloat16(1), donate_argnums=0)
    seconds, _ = seconds_per_call(copy, random_array((size // 2,), jnp.bfloat16), calls=3 if run.tiny else 50)
    run.row(COPY, 2 * size / seconds / 1e9, "GB/s")
    dim = 128 if run.tiny else 8192
    # The scale keeps a chain of products finite.
    weights = random_array((dim, dim), jnp.bfloat16) * dim**-0.5
    seconds, _ = seconds_per_call(jax.jit(lambda x: x @ weights), weights, calls=3 if run.tiny else 30)
    run.row(MATMUL, 2 * dim**3 / seconds / 1e12, "TFLOP/s")
