"""Attention: decode steps and prefill of common models over a one-layer pool."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import (
    BACKENDS,
    AttentionOptions,
    Backend,
    BackendName,
    KernelTarget,
    PagedKV,
    Problem,
    Rows,
    kv_layout,
    kv_platform,
    paged_attention,
)
from pallas_kernels.paged_attention.tuning import facts
from pallas_kernels.tune.task import Task, random_array, seconds_a_step
from pallas_kernels.tuning import Kind

# (query heads, KV heads, head size): Llama 8B and 70B, Qwen3 0.6B, Llama 1B and SmolLM2, Phi, Gemma.
HEADS = ((32, 8, 128), (64, 8, 128), (16, 8, 128), (32, 8, 64), (9, 3, 64), (32, 32, 96), (8, 4, 256))
# Query heads of a shard that share latent rows of 576 numbers, whose first 512 are the value: DeepSeek-V3, Kimi-K2, and
# DeepSeek-V2-Lite, as many as DeepSeek-V3 on eight devices.
LATENT_HEADS = (128, 64, 16)
LATENT_ROW = (576, 512)
PAGE_SIZES = (16, 64, 32, 128)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work to time: decodes of `rows` at `context` tokens, or prefill of `rows` prompts of `context` tokens."""

    kind: Kind
    rows: int
    context: int
    repeats: int


WORKLOADS = (Workload("decode", 64, 2048, 20), Workload("prefill", 2, 4096, 5))
TINY_WORKLOADS = (Workload("decode", 2, 40, 1), Workload("prefill", 1, 20, 1))


def tasks(backend: BackendName, target: KernelTarget, *, fp8: bool, tiny: bool) -> Iterator[Task]:
    """Yield the tasks to time, with `fp8` also those with a KV cache of it; with `tiny`, those to be interpreted."""
    module: Any = BACKENDS.module(backend)
    problems = tiny_problems() if tiny else list(deployment_problems(fp8=fp8))
    for problem, workload in itertools.product(problems, TINY_WORKLOADS if tiny else WORKLOADS):
        refusal = BACKENDS.refusal(backend, target, (problem,))
        candidates = [] if refusal else module.candidates(workload.kind, problem, target)
        yield Task(
            workload.kind,
            facts(problem),
            refusal,
            candidates[: 2 if tiny else None],
            functools.partial(_seconds, backend, problem, workload),
        )


def deployment_problems(*, fp8: bool) -> Iterator[Problem]:
    """Yield the grid: heads of common models on one shard, page sizes, bfloat16 with a KV cache of bfloat16 or fp8."""
    bf16 = jnp.dtype(jnp.bfloat16)
    head_dim, value_dim = LATENT_ROW
    heads: list[tuple[int, int, int, int | None]] = [(*of_model, None) for of_model in HEADS]
    heads += [(count, 1, head_dim, value_dim) for count in LATENT_HEADS]
    for (count, kv_heads, size, value), page_size in itertools.product(heads, PAGE_SIZES):
        for kv_dtype in (bf16, jnp.dtype(jnp.float8_e4m3fn)) if fp8 else (bf16,):
            yield Problem(count, kv_heads, size, page_size, bf16, kv_dtype, value)


def tiny_problems() -> list[Problem]:
    """Return a problem that interpret mode computes in seconds."""
    return [Problem(2, 1, 16, 16, jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))]


def _seconds(backend: BackendName, problem: Problem, workload: Workload, target: KernelTarget) -> float:
    step, kv = make_step(Backend(backend, target=target), problem, workload)
    return seconds_a_step(step, kv, workload.repeats)


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
        platform=kv_platform(backend),
        value_dim=problem.value_dim,
    )
    fp8 = problem.kv_dtype == jnp.float8_e4m3fn
    scales = jnp.full((2, 1, problem.kv_heads), 0.02, jnp.float32) if fp8 else None
    keys, values = (random_array(shape, layout.dtype) for shape in (layout.shape, layout.values_shape))
    kv = layout.paged_kv(keys, values, scales)
    is_decode, count = workload.kind == "decode", workload.rows
    rows = Rows(
        jnp.asarray(rng.permutation(count * used).reshape(count, used).astype(np.int32)),
        jnp.arange(count + 1, dtype=jnp.int32) * new,
        jnp.full(count, workload.context, jnp.int32),
        jnp.int32(count if is_decode else 0),
        jnp.int32(count),
        decode_only=is_decode,
    )
    options = AttentionOptions(problem.head_dim**-0.5)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(kv: PagedKV, q: jax.Array, k: jax.Array, v: jax.Array | None, rows: Rows) -> tuple[PagedKV, jax.Array]:
        out, kv = paged_attention(q, k, v, kv, 0, rows, options, backend)
        return kv, out

    values = normal(problem.kv_heads) if problem.value_dim is None else None
    new_tokens = normal(problem.heads), normal(problem.kv_heads), values
    return lambda kv: step(kv, *new_tokens, rows)[0], kv
