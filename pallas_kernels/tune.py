"""`python -m pallas_kernels.tune`: times candidate block sizes on the device at hand and writes its tuned table.

Each backend has its own candidates (`candidates` in its file); those that don't compile are skipped. The table's
entries of other backends and problems stay. Without an accelerator it prints an error and exits with 1, unless
`--interpret-tiny` makes a dry run on the CPU, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import (
    Backend,
    BackendName,
    KernelTarget,
    PagedKV,
    Problem,
    kv_layout,
    paged_attention,
    target_of,
)
from pallas_kernels.paged_attention.backends import backend_module
from pallas_kernels.paged_attention.tuning import TABLES, facts
from pallas_kernels.tuning import Kind, device_name, read_entries, write_entries

# (query heads, KV heads, head size): Llama 8B and 70B, Qwen3 0.6B, Llama 1B and SmolLM2, Phi, Gemma.
HEADS = ((32, 8, 128), (64, 8, 128), (16, 8, 128), (32, 8, 64), (9, 3, 64), (32, 32, 96), (8, 4, 256))
PAGE_SIZES = (16, 64, 32, 128)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What to time: decodes of `rows` at `context` tokens, or prefill of `rows` prompts of `context` tokens."""

    kind: Kind
    rows: int
    context: int
    repeats: int


WORKLOADS = (Workload("decode", 64, 2048, 20), Workload("prefill", 2, 4096, 5))
TINY_WORKLOADS = (Workload("decode", 2, 40, 1), Workload("prefill", 1, 20, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=get_args(BackendName), default="triton", help="default: triton")
    parser.add_argument("--output", type=Path, help="the table to write; default: the device's in the package")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no new problem after this time; default: 30")
    parser.add_argument("--fp8", action="store_true", help="also with a KV cache of fp8")
    parser.add_argument("--interpret-tiny", action="store_true", help="a dry run on the CPU; needs --output")
    options = parser.parse_args(arguments)
    target = target_of(jax.devices()[0])
    if options.interpret_tiny:
        if options.output is None:
            parser.error("--interpret-tiny needs --output: its times belong in no tuned table")
        target = KernelTarget("cpu")
    elif target.platform == "cpu":
        print("no accelerator is attached, and a CPU has no kernels to tune", file=sys.stderr)
        return 1
    module = backend_module(options.backend)
    if not hasattr(module, "candidates"):
        print(f"backend {options.backend!r} has no block sizes to tune", file=sys.stderr)
        return 1
    path = options.output or TABLES / f"{device_name(target)}.json"
    problems = tiny_problems() if options.interpret_tiny else list(deployment_problems(fp8=options.fp8))
    until = time.monotonic() + 60 * options.minutes
    for problem, workload in itertools.product(problems, TINY_WORKLOADS if options.interpret_tiny else WORKLOADS):
        if refusal := module.refusal(problem, target):
            print(f"{workload.kind} {facts(problem)}: {refusal}")
            continue
        if time.monotonic() > until:
            print(f"{options.minutes:g} minutes are over; the remaining problems are not timed")
            break
        sizes = module.candidates(workload.kind, problem, target)[: 2 if options.interpret_tiny else None]
        best = fastest(options.backend, problem, workload, target, sizes)
        if best is not None:
            # Written at once, so that an interrupted run keeps its results.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_entries(path, merged(read_entries(path), options.backend, problem, workload.kind, best))
    print(f"wrote {path}" if path.exists() else "no candidate could be timed")
    return 0 if path.exists() else 1


def deployment_problems(*, fp8: bool) -> Iterator[Problem]:
    """Yield the grid: heads of common models on one shard, page sizes, bfloat16 with a KV cache of bfloat16 or fp8."""
    bf16 = jnp.dtype(jnp.bfloat16)
    for (heads, kv_heads, head_dim), page_size in itertools.product(HEADS, PAGE_SIZES):
        for kv_dtype in (bf16, jnp.dtype(jnp.float8_e4m3fn)) if fp8 else (bf16,):
            yield Problem(heads, kv_heads, head_dim, page_size, bf16, kv_dtype)


def tiny_problems() -> list[Problem]:
    """Return a problem that interpret mode computes in seconds."""
    return [Problem(2, 1, 16, 16, jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))]


def fastest(
    backend: BackendName, problem: Problem, workload: Workload, target: KernelTarget, candidates: list[dict[str, int]]
) -> dict[str, int] | None:
    """Time each candidate, print its time, and return the fastest, or None if none compiles."""
    timed: list[tuple[float, dict[str, int]]] = []
    for blocks in candidates:
        sizes = frozenset((workload.kind, name, size) for name, size in blocks.items())
        try:
            seconds = step_seconds(
                Backend(backend, target=dataclasses.replace(target, blocks=sizes)), problem, workload
            )
        except Exception as error:  # compilers' errors have no common type
            print(f"{workload.kind} {facts(problem)} {blocks}: {str(error).splitlines()[0][:100]}")
            continue
        timed.append((seconds, blocks))
        print(f"{workload.kind} {facts(problem)} {blocks}: {seconds * 1e6:.1f} us", flush=True)
    return min(timed, key=lambda one: one[0])[1] if timed else None


def step_seconds(backend: Backend, problem: Problem, workload: Workload) -> float:
    """Return the seconds of a step: the best of three runs of `workload.repeats` steps over a one-layer pool."""
    step, kv = make_step(backend, problem, workload)
    kv = step(kv)
    jax.block_until_ready(kv)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(workload.repeats):
            kv = step(kv)
        jax.block_until_ready(kv)
        best = min(best, (time.perf_counter() - start) / workload.repeats)
    return best


def make_step(backend: Backend, problem: Problem, workload: Workload) -> tuple[Callable[[PagedKV], PagedKV], PagedKV]:
    """Return a step, attention of one layer over its pool, which takes and returns the pool; and the pool."""
    new = 1 if workload.kind == "decode" else workload.context
    tokens, used = workload.rows * new, -(-workload.context // problem.page_size)
    rng = np.random.default_rng(0)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((tokens, heads, problem.head_dim), dtype=np.float32), problem.dtype)

    layout = kv_layout(
        num_layers=1,
        num_pages=workload.rows * used,
        page_size=problem.page_size,
        num_kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        dtype=problem.kv_dtype,
        platform=backend.kv_platform,
    )
    fp8 = problem.kv_dtype == jnp.float8_e4m3fn
    scales = jnp.full((2, 1, problem.kv_heads), 0.02, jnp.float32) if fp8 else None
    keys, values = (jnp.ones(shape, layout.dtype) for shape in (layout.shape, layout.values_shape))
    kv = layout.paged_kv(keys, values, scales)
    arrays = (
        normal(problem.heads),
        normal(problem.kv_heads),
        normal(problem.kv_heads),
        rng.permutation(workload.rows * used).reshape(workload.rows, used).astype(np.int32),
        np.arange(workload.rows + 1, dtype=np.int32) * new,
        np.full(workload.rows, workload.context, np.int32),
        np.int32(workload.rows if workload.kind == "decode" else 0),
        np.int32(workload.rows),
    )
    options = {"scale": problem.head_dim**-0.5, "decode_only": workload.kind == "decode", "backend": backend}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(kv: PagedKV, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[PagedKV, jax.Array]:
        out, kv = paged_attention(q, k, v, kv, 0, *rest, **options)
        return kv, out

    arrays = jax.tree.map(jnp.asarray, arrays)
    return lambda kv: step(kv, *arrays)[0], kv


def merged(
    entries: list[dict[str, Any]], backend: str, problem: Problem, kind: Kind, blocks: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the entries with this one added, in place of an older one of the same key."""
    key = {"backend": backend, "kind": kind, "problem": facts(problem)}
    others = [entry for entry in entries if {name: entry[name] for name in key} != key]
    return [*others, {**key, "blocks": blocks}]


if __name__ == "__main__":
    sys.exit(main())
