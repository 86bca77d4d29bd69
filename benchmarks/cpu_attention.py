"""Measures the attention of a whole step on this CPU: backend `cpu` against `reference`, bfloat16.

A program has only the attention calls of the layers on one pool, with pages in random order: the 30 of SmolLM2-135M, or
two layers of DeepSeek-V3's latent rows with the heads of one of 8 shards, or with all heads. The two backends run in
turn, so that other activity of the machine affects both alike.

    python -m benchmarks.cpu_attention --rounds 15
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.cli.common.table import format_table
from pallas_kernels.cpu import cpu_features
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Backend,
    BackendName,
    PagedKV,
    Rows,
    kv_layout,
    paged_attention,
    target_of,
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 30, 9, 3, 64, 16
LATENT_LAYERS, LATENT_DIM, VALUE_DIM = 2, 576, 512
BACKENDS: tuple[BackendName, ...] = ("reference", "cpu")
OUTPUT = Path(__file__).parent / "results/cpu/cpu_attention.json"


@dataclasses.dataclass(frozen=True)
class Shape:
    """`rows` sequences of `length` tokens, the last `new` of them queries; `shared` pages are the same for all.

    The rows of the pool are latent if `latent_heads` isn't 0.
    """

    rows: int
    length: int
    new: int = 1
    shared: int = 0
    latent_heads: int = 0

    def __str__(self) -> str:
        more = f", {self.latent_heads} heads of latent rows" if self.latent_heads else ""
        if self.new > 1:
            return f"prefill of {self.new} after {self.length - self.new}{more}"
        return f"{self.rows} x {self.length}" + (f", {self.shared * PAGE} shared" if self.shared else "") + more


SHAPES = (
    Shape(1, 190),
    Shape(1, 2000),
    Shape(16, 190),
    Shape(32, 630, shared=31),
    Shape(64, 300),
    Shape(1, 512, new=512),
    Shape(1, 728, new=128),
    Shape(1, 1064, new=64),
    Shape(1, 2000, latent_heads=16),
    Shape(16, 600, latent_heads=16),
    Shape(16, 600, latent_heads=128),
    Shape(1, 512, new=512, latent_heads=16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", default=str(OUTPUT))
    args = parser.parse_args()
    report: dict[str, Any] = {"rounds": args.rounds, "machine_load_at_start": os.getloadavg()[0], "shapes": []}
    rows = []
    for shape in SHAPES:
        found = measure(shape, args.rounds)
        report["shapes"].append({"shape": str(shape), **found})
        ms = [f"{found[name]['ms']:.2f} ({found[name]['least_ms']:.2f})" for name in BACKENDS]
        seconds = " / ".join(f"{found[name]['compile_s']:.1f}" for name in BACKENDS)
        rows.append([str(shape), *ms, f"{found['reference']['ms'] / found['cpu']['ms']:.1f}", seconds])
    print(format_table(("", "reference ms", "cpu ms", "times", "compile s"), rows))
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


def measure(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median and minimum milliseconds per step and the compile time of both backends."""
    steps: dict[BackendName, Callable[[], None]] = {}
    out: dict[str, dict[str, float]] = {}
    for name in BACKENDS:
        begin = time.perf_counter()
        steps[name] = compiled(shape, name)
        out[name] = {"compile_s": time.perf_counter() - begin}
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for i in range(rounds + 3):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if i >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    for name in BACKENDS:
        out[name] |= {"ms": statistics.median(times[name]), "least_ms": min(times[name])}
    return out


def compiled(shape: Shape, name: BackendName) -> Callable[[], None]:
    """Compile a step of a backend; return a function that runs it on its own pool."""
    rng = np.random.default_rng(0)
    used = -(-shape.length // PAGE)
    num_pages = shape.shared + shape.rows * (used - shape.shared)
    pages = rng.permutation(num_pages).astype(np.int32)
    table = np.zeros((shape.rows, used), np.int32)
    table[:, : shape.shared] = pages[: shape.shared]
    table[:, shape.shared :] = pages[shape.shared :].reshape(shape.rows, -1)
    is_latent = shape.latent_heads > 0
    heads, kv_heads, head_dim = (shape.latent_heads, 1, LATENT_DIM) if is_latent else (HEADS, KV_HEADS, HEAD_DIM)
    layers = LATENT_LAYERS if is_latent else LAYERS
    layout = kv_layout(
        num_layers=layers,
        num_pages=num_pages,
        page_size=PAGE,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=np.dtype(jnp.bfloat16),
        value_dim=VALUE_DIM if is_latent else None,
    )
    numbers = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    kv = layout.paged_kv(numbers(jax.random.key(0), layout.shape), numbers(jax.random.key(1), layout.values_shape))
    is_decode = shape.new == 1
    rows = Rows(
        jnp.asarray(table),
        jnp.arange(shape.rows + 1, dtype=jnp.int32) * shape.new,
        jnp.full(shape.rows, shape.length, jnp.int32),
        jnp.int32(shape.rows if is_decode else 0),
        jnp.int32(shape.rows),
        decode_only=is_decode,
    )
    q = numbers(jax.random.key(2), (shape.rows * shape.new, heads, head_dim))
    backend = Backend(name, target_of(jax.devices("cpu")[0]))
    attend = functools.partial(paged_attention, options=AttentionOptions(head_dim**-0.5), backend=backend)

    def step(kv: PagedKV, q: jax.Array, rows: Rows) -> tuple[jax.Array, PagedKV]:
        for layer in range(layers):
            v = None if is_latent else q[:, kv_heads : 2 * kv_heads]
            out, kv = attend(q, q[:, :kv_heads], v, kv, layer, rows)
            q = q.at[:, :, : out.shape[2]].add(out)
        return q, kv

    program = jax.jit(step, donate_argnums=0).lower(kv, q, rows).compile(_compiler_options())
    held = [kv]

    def run() -> None:
        out, held[0] = program(held[0], q, rows)
        jax.block_until_ready((out, held[0]))

    return run


def _compiler_options() -> dict[str, int]:
    """Return the compiler options of the engine."""
    return {"xla_cpu_prefer_vector_width": 512} if "avx512f" in cpu_features() else {}


if __name__ == "__main__":
    main()
