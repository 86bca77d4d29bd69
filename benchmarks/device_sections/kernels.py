"""Paged attention on the device: correctness, then speed beside the device's own rates."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_sections import experts, quantized, sampling, small_model
from device_sections.machine import COPY, MATMUL
from device_sections.run import SectionRun, seconds_per_call
from pallas_kernels.paged_attention import (
    BACKENDS,
    AttentionOptions,
    Backend,
    BackendName,
    KernelTarget,
    Problem,
    Rows,
    choose_backend,
    kv_layout,
    paged_attention,
    target_of,
)
from pallas_kernels.paged_attention.layout import as_pool_rows
from pallas_kernels.tune.task import random_array
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention.cases import (
    CASES,
    Batch,
    Case,
    make_batch,
    options_of,
    rows_of,
)

# Heads of a Llama-3.1-8B.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}
_LLAMA_LIKE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 64, "dtype": "bfloat16"}
_VARIED = [
    case
    for kv_dtype in (None, "float8_e4m3fn")
    for case in (
        Case(
            f"decode {kv_dtype or 'bfloat16'}",
            ((300, 1), (17, 1), (129, 1)),
            3,
            decode_only=True,
            kv_dtype=kv_dtype,
            **_LLAMA_LIKE,
        ),
        Case(
            f"prefill {kv_dtype or 'bfloat16'}", ((130, 130), (140, 12), (300, 70)), 0, kv_dtype=kv_dtype, **_LLAMA_LIKE
        ),
    )
]
_BF16, _FP8 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)


def correctness(run: SectionRun) -> None:
    """Check the kernels that serve by default, and a small model that uses them, each in a process of its own."""
    parts: dict[str, Callable[[SectionRun], None]] = {
        "attention": _default_attention,
        "products": quantized.check_defaults,
        "experts": experts.check_defaults,
        "sampling": sampling.check,
        "model": small_model.check,
    }
    if run.part:
        parts[run.part](run)
    else:
        run.in_processes(list(parts))


def _default_attention(run: SectionRun) -> None:
    """Compare the default backend with float64 on every case of the test suite; shapes that are measured come first."""
    name = choose_backend(target_of(run.device), _problem(_VARIED[0])).name
    _compare(run, name, [*_VARIED, *_cases(name, target_of(run.device))])


def every_case(run: SectionRun) -> None:
    """Compare the other backends with float64 on every case of the test suite, and every set of block sizes of every
    backend on a few; each backend in a process of its own."""
    target = target_of(run.device)
    if not run.part:
        run.in_processes([name for name in BACKENDS.names if _refusal(name, _VARIED[0], target) is None])
        return
    name: Any = run.part
    if choose_backend(target, _problem(_VARIED[0])).name != name:
        _compare(run, name, [*_VARIED, *_cases(name, target)])
    if hasattr(BACKENDS.module(name), "candidates"):
        _variants(run, name, target)


def _compare(run: SectionRun, name: BackendName, cases: Sequence[Case]) -> None:
    """Run the cases that a backend supports here, without interpretation."""
    target = target_of(run.device)
    taken = [case for case in cases if _refusal(name, case, target) is None]
    checks = {str(case): functools.partial(_fault, case, name, run) for case in taken}
    run.compare(f"attention, {name}", checks, len(cases) - len(taken))


def _refusal(name: BackendName, case: Case, target: KernelTarget) -> str | None:
    """Return why a backend doesn't take a case, or None."""
    return BACKENDS.refusal(name, target, (_problem(case),))


def _variants(run: SectionRun, name: BackendName, target: KernelTarget) -> None:
    """Check every set of block sizes that tuning may choose on one case of each kind."""
    module: Any = BACKENDS.module(name)
    for case in _VARIED:
        kind, problem = case.name.partition(" ")[0], _problem(case)
        if BACKENDS.refusal(name, target, (problem,)) is not None:
            continue
        checks = {}
        for blocks in module.candidates(kind, problem, target):
            chosen = frozenset((kind, part, int(size)) for part, size in blocks.items())
            checks[str(blocks)] = functools.partial(_fault, case, name, run, chosen)
        run.compare(f"attention, {name}: {kind}{_over(problem.kv_dtype)} variants", checks, 0)


def _cases(name: BackendName, target: KernelTarget) -> Iterator[Case]:
    """Yield the suite's cases, in bfloat16 if the backend refuses float32."""
    for case in CASES:
        if case.dtype == "float32" and BACKENDS.refusal(name, target, (_problem(case),)) is not None:
            yield dataclasses.replace(case, name=f"{case.name}, bfloat16", dtype="bfloat16")
        else:
            yield case


def _problem(case: Case) -> Problem:
    dtype, kv_dtype = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    return Problem(case.heads, case.kv_heads, case.head_dim, case.page_size, dtype, kv_dtype)


def _fault(
    case: Case, name: BackendName, run: SectionRun, blocks: frozenset[tuple[str, str, int]] = frozenset()
) -> str | None:
    batch = make_batch(case)
    target = dataclasses.replace(target_of(run.device), blocks=blocks)
    call = jax.jit(functools.partial(paged_attention, backend=Backend(name, target)))
    kv = _pool_of(case, batch, _layout_platform(name, run))
    where = np.int32(case.layer), rows_of(case, batch), options_of(case, batch)
    out, _ = call(batch.q, batch.k, batch.v, kv, *where)
    expected = naive.attention(case, batch)
    error = float(np.abs(np.asarray(out)[: len(expected)].astype(np.float64) - expected).max(initial=0.0))
    return None if error <= _TOLERANCE[case.dtype] else f"error {error:.3g}"


def _layout_platform(name: str, run: SectionRun) -> str:
    return "tpu" if name == "mosaic_tpu" else run.device.platform


def _pool_of(case: Case, batch: Batch, platform: str) -> Any:
    kv_heads, entries, page_size, head_dim = batch.keys.shape
    layout = kv_layout(
        num_layers=case.num_layers,
        num_pages=entries // case.num_layers,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=batch.keys.dtype,
        platform=platform,
    )
    arrays = (jnp.zeros(shape, layout.dtype) for shape in (layout.shape, layout.values_shape))
    kv = layout.paged_kv(*arrays, None if batch.scales is None else jnp.asarray(batch.scales))
    pools = as_pool_rows(jnp.asarray(batch.keys), jnp.asarray(batch.values), kv)
    return kv.with_pools([pool.swapaxes(0, 1) for pool in pools] if kv.page_major else pools)


def decode(run: SectionRun) -> None:
    """Measure decode in GB/s of keys and values by batch, context and page size; the reference is a copy's rate."""
    pages, contexts, batches = ((16,), (64,), (2,)) if run.tiny else ((16, 64), (1024, 4096, 8192), (128, 64, 256))
    shapes = [(kv_dtype, *shape) for kv_dtype in (_BF16, _FP8) for shape in itertools.product(pages, contexts, batches)]
    # The shape that serving sees most comes first; an fp8 cache is measured at one batch and page size.
    for kv_dtype, page_size, context, batch in shapes:
        if kv_dtype == _FP8 and (page_size, batch) != (pages[-1], batches[0]):
            continue
        for name in _usable(run, kv_dtype):
            if run.left < 10:
                return
            label = f"{name} decode{_over(kv_dtype)} {batch} x {context}, page {page_size}"
            with run.reporting(label):
                seconds = _measure(run, name, [(context, 1)] * batch, page_size, kv_dtype, decode_only=True)
                read = batch * context * KV_HEADS * HEAD_DIM * 2 * kv_dtype.itemsize
                goal = 0.8 if kv_dtype == _BF16 else None
                run.row(label, read / seconds / 1e9, "GB/s", reference=run.found(COPY), goal=goal)


def prefill(run: SectionRun) -> None:
    """Measure prefill in TFLOP/s of one causal prompt; the reference is the matmul rate."""
    pages, lengths = ((16,), (32,)) if run.tiny else ((16, 64), (2048, 8192, 4096, 16384))
    shapes = [(_BF16, *shape) for shape in itertools.product(pages, lengths)]
    for kv_dtype, page_size, length in [*shapes, *(() if run.tiny else ((_FP8, pages[-1], lengths[1]),))]:
        for name in _usable(run, kv_dtype):
            if run.left < 10:
                return
            label = f"{name} prefill{_over(kv_dtype)} {length}, page {page_size}"
            with run.reporting(label):
                seconds = _measure(run, name, [(length, length)], page_size, kv_dtype, decode_only=False)
                rate = 4 * HEADS * HEAD_DIM * length * length / 2 / seconds / 1e12
                note = "goal: 450 TFLOP/s" if kv_dtype == _BF16 and not run.tiny else ""
                run.row(label, rate, "TFLOP/s", reference=run.found(MATMUL), note=note)


def _over(kv_dtype: np.dtype) -> str:
    return " over fp8" if kv_dtype == _FP8 else ""


def _usable(run: SectionRun, kv_dtype: np.dtype) -> Iterator[BackendName]:
    """Yield the kernels that support this device; the portable one only if there is no other."""
    problem = Problem(HEADS, KV_HEADS, HEAD_DIM, 16, _BF16, kv_dtype)
    able = [name for name in BACKENDS.names if BACKENDS.refusal(name, target_of(run.device), (problem,)) is None]
    yield from [name for name in able if name != "reference"] or able


def _measure(
    run: SectionRun,
    name: BackendName,
    rows: list[tuple[int, int]],
    page_size: int,
    kv_dtype: np.dtype,
    *,
    decode_only: bool,
) -> float:
    """Return the seconds of a call."""
    used = [-(-length // page_size) for length, _ in rows]
    layout = kv_layout(
        num_layers=1,
        num_pages=sum(used) + 1,
        page_size=page_size,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=kv_dtype,
        platform=_layout_platform(name, run),
    )
    scales = jnp.ones((2, 1, KV_HEADS), jnp.float32) if kv_dtype == _FP8 else None
    kv = layout.paged_kv(*(random_array(shape, layout.dtype) for shape in (layout.shape, layout.values_shape)), scales)
    ids = np.random.default_rng(0).permutation(sum(used)).astype(np.int32)
    page_table = np.zeros((len(rows), max(used)), np.int32)
    for row, pages in enumerate(np.split(ids, np.cumsum(used)[:-1])):
        page_table[row, : len(pages)] = pages
    new = [count for _, count in rows]
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    queries = random_array((sum(new), HEADS, HEAD_DIM), jnp.bfloat16)
    fresh = random_array((sum(new), KV_HEADS, HEAD_DIM), jnp.bfloat16)
    lengths = np.array([length for length, _ in rows], np.int32)
    counts = np.int32(len(rows) if decode_only else 0), np.int32(len(rows))
    of_rows = Rows(page_table, starts, lengths, *counts, decode_only=decode_only)
    facts = jax.device_put((np.int32(0), of_rows, AttentionOptions(HEAD_DIM**-0.5)))
    backend = Backend(name, target_of(run.device))
    call = jax.jit(functools.partial(paged_attention, backend=backend), donate_argnums=3)
    seconds, _ = seconds_per_call(
        lambda state: call(queries, fresh, fresh, state[1], *facts), (queries, kv), calls=1 if run.tiny else 20
    )
    return seconds
