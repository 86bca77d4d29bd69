"""`python -m pallas_kernels.tune`: times candidate block sizes on the device at hand and writes its tuned table.

Candidates are a backend's own (`candidates` in its file); what doesn't compile is passed over. Entries of other
backends and problems in the table stay as they are. Without an accelerator it says so and ends with 1, unless
`--interpret-tiny` asks for a dry run on the CPU, whose times mean nothing.
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
    PagedKV,
    Problem,
    Target,
    kv_layout,
    paged_attention,
    target_of,
)
from pallas_kernels.paged_attention.backends import backend_module
from pallas_kernels.paged_attention.tuning import (
    TABLES,
    Kind,
    device_name,
    facts,
    read_entries,
    write_entries,
)

# (query heads, KV heads, head size): Llama 8B and 70B, Qwen3 0.6B, Llama 1B and SmolLM2, Phi, Gemma.
HEADS = ((32, 8, 128), (64, 8, 128), (16, 8, 128), (32, 8, 64), (9, 3, 64), (32, 32, 96), (8, 4, 256))
PAGE_SIZES = (16, 64, 32, 128)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed: decodes of `rows` at `context` tokens, or prefill of `rows` prompts of `context` tokens."""

    kind: Kind
    rows: int
    context: int
    repeats: int


WORKS = (Work("decode", 64, 2048, 20), Work("prefill", 2, 4096, 5))
TINY_WORKS = (Work("decode", 2, 40, 1), Work("prefill", 1, 20, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=get_args(BackendName), default="triton", help="default: triton")
    parser.add_argument("--output", type=Path, help="the table to write; default: the device's in the package")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no new problem after so long; default: 30")
    parser.add_argument("--fp8", action="store_true", help="also with a KV cache of fp8")
    parser.add_argument("--interpret-tiny", action="store_true", help="a dry run on the CPU; needs --output")
    options = parser.parse_args(arguments)
    target = target_of(jax.devices()[0])
    if options.interpret_tiny:
        if options.output is None:
            parser.error("--interpret-tiny needs --output: its times are no table's")
        target = Target("cpu")
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
    for problem, work in itertools.product(problems, TINY_WORKS if options.interpret_tiny else WORKS):
        if refusal := module.refusal(problem, target):
            print(f"{work.kind} {facts(problem)}: {refusal}")
            continue
        if time.monotonic() > until:
            print(f"{options.minutes:g} minutes are over; the rest stays as it was")
            break
        sizes = module.candidates(work.kind, problem, target)[: 2 if options.interpret_tiny else None]
        best = fastest(options.backend, problem, work, target, sizes)
        if best is not None:
            # Written at once, so that an interrupted run keeps what it has.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_entries(path, merged(read_entries(path), options.backend, problem, work.kind, best))
    print(f"wrote {path}" if path.exists() else "nothing could be timed")
    return 0 if path.exists() else 1


def deployment_problems(*, fp8: bool) -> Iterator[Problem]:
    """The grid: heads of common models on one shard, page sizes, bfloat16 with its own KV or one of fp8."""
    bf16 = jnp.dtype(jnp.bfloat16)
    for (heads, kv_heads, head_dim), page_size in itertools.product(HEADS, PAGE_SIZES):
        for kv_dtype in (bf16, jnp.dtype(jnp.float8_e4m3fn)) if fp8 else (bf16,):
            yield Problem(heads, kv_heads, head_dim, page_size, bf16, kv_dtype)


def tiny_problems() -> list[Problem]:
    """One that interpret mode is done with in seconds."""
    return [Problem(2, 1, 16, 16, jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))]


def fastest(
    backend: BackendName, problem: Problem, work: Work, target: Target, candidates: list[dict[str, int]]
) -> dict[str, int] | None:
    """The candidate whose step took the least time, each printed as it is known."""
    timed: list[tuple[float, dict[str, int]]] = []
    for blocks in candidates:
        asked = frozenset((work.kind, name, size) for name, size in blocks.items())
        try:
            seconds = step_seconds(Backend(backend, target=dataclasses.replace(target, blocks=asked)), problem, work)
        except Exception as error:  # a compiler's refusal has no one type
            print(f"{work.kind} {facts(problem)} {blocks}: {str(error).splitlines()[0][:100]}")
            continue
        timed.append((seconds, blocks))
        print(f"{work.kind} {facts(problem)} {blocks}: {seconds * 1e6:.1f} us", flush=True)
    return min(timed, key=lambda one: one[0])[1] if timed else None


def step_seconds(backend: Backend, problem: Problem, work: Work) -> float:
    """The best of three runs of `work.repeats` steps, each with a pool of its own layer's size."""
    step, kv = make_step(backend, problem, work)
    kv = step(kv)
    jax.block_until_ready(kv)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(work.repeats):
            kv = step(kv)
        jax.block_until_ready(kv)
        best = min(best, (time.perf_counter() - start) / work.repeats)
    return best


def make_step(backend: Backend, problem: Problem, work: Work) -> tuple[Callable[[PagedKV], PagedKV], PagedKV]:
    """Attention of one layer over its pool, which it takes and gives back, and the pool."""
    new = 1 if work.kind == "decode" else work.context
    tokens, used = work.rows * new, -(-work.context // problem.page_size)
    rng = np.random.default_rng(0)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((tokens, heads, problem.head_dim), dtype=np.float32), problem.dtype)

    layout = kv_layout(
        num_layers=1,
        num_pages=work.rows * used,
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
        rng.permutation(work.rows * used).reshape(work.rows, used).astype(np.int32),
        np.arange(work.rows + 1, dtype=np.int32) * new,
        np.full(work.rows, work.context, np.int32),
        np.int32(work.rows if work.kind == "decode" else 0),
        np.int32(work.rows),
    )
    options = {"scale": problem.head_dim**-0.5, "decode_only": work.kind == "decode", "backend": backend}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(kv: PagedKV, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[PagedKV, jax.Array]:
        out, kv = paged_attention(q, k, v, kv, 0, *rest, **options)
        return kv, out

    arrays = jax.tree.map(jnp.asarray, arrays)
    return lambda kv: step(kv, *arrays)[0], kv


def merged(
    entries: list[dict[str, Any]], backend: str, problem: Problem, kind: Kind, blocks: dict[str, int]
) -> list[dict[str, Any]]:
    """The entries with this one in the place of an older one."""
    key = {"backend": backend, "kind": kind, "problem": facts(problem)}
    others = [entry for entry in entries if {name: entry[name] for name in key} != key]
    return [*others, {**key, "blocks": blocks}]


if __name__ == "__main__":
    sys.exit(main())
