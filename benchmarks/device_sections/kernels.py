"""Paged attention on the device: correctness, then speed beside the device's own rates."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from device_sections.machine import COPY, MATMUL
from device_sections.run import SectionRun, seconds_per_call
from pallas_kernels.paged_attention import (
    Backend,
    BackendName,
    KernelTarget,
    Problem,
    kv_layout,
    paged_attention,
    target_of,
)
from pallas_kernels.paged_attention.backends import backend_module
from pallas_kernels.paged_attention.layout import as_pool_rows
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention.cases import CASES, Batch, Case, make_batch

# Heads of a Llama-3.1-8B.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}
_TINY_CASES = 2
_LLAMA_LIKE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 64, "dtype": "bfloat16"}
_VARIED = [
    case
    for kv_dtype in (None, "float8_e4m3fn")
    for case in (
        Case("decode", ((300, 1), (17, 1), (129, 1)), 3, decode_only=True, kv_dtype=kv_dtype, **_LLAMA_LIKE),
        Case("prefill", ((130, 130), (140, 12), (300, 70)), 0, kv_dtype=kv_dtype, **_LLAMA_LIKE),
    )
]
_BF16, _FP8 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)


def correctness(run: SectionRun) -> None:
    """Compare every backend with float64 on a few cases of the shapes that are measured."""
    _compare(run, lambda name, target: _VARIED)


def every_case(run: SectionRun) -> None:
    """Compare every backend with float64 on every case of the test suite, and every set of block sizes on a few."""
    _compare(run, _cases)
    target = target_of(run.device)
    for name in get_args(BackendName):
        if hasattr(backend_module(name), "candidates"):
            _variants(run, name, target)


def _compare(run: SectionRun, cases_of: Callable[[BackendName, KernelTarget], Iterable[Case]]) -> None:
    """Run the cases that each backend supports here, without interpretation."""
    target = target_of(run.device)
    for name in get_args(BackendName):
        refused, wrong, right, skipped = 0, [], 0, 0
        for case in cases_of(name, target):
            if backend_module(name).refusal(_problem(case), target) is not None:
                refused += 1
            elif run.left < 5 or (run.tiny and right + len(wrong) >= _TINY_CASES):
                skipped += 1
            elif (fault := _fault(case, name, run)) is None:
                right += 1
            else:
                wrong.append(f"{case}: {fault}")
        note = f"{refused} refused, {skipped} not tried"
        run.row(f"{name}: cases right", right, "cases", reference=right + len(wrong) or None, goal=1, note=note)
        for fault in wrong:
            run.row(f"{name}: wrong", 0, "", note=fault)


def _variants(run: SectionRun, name: BackendName, target: KernelTarget) -> None:
    """Check every set of block sizes that tuning may choose on one case of each kind."""
    for case in _VARIED:
        kind, problem = case.name, _problem(case)
        if backend_module(name).refusal(problem, target) is not None:
            continue
        right, unbuilt, wrong = 0, 0, []
        module: Any = backend_module(name)
        for blocks in module.candidates(kind, problem, target)[: 1 if run.tiny else None]:
            if run.left < 5:
                break
            chosen = frozenset((kind, part, int(size)) for part, size in blocks.items())
            fault = _fault(case, name, run, chosen)
            right, unbuilt = right + (fault is None), unbuilt + (fault is not None and not fault.startswith("error "))
            wrong += [f"{blocks}: {fault}"] if fault is not None and fault.startswith("error ") else []
        tried, label = right + len(wrong), f"{name}: {kind}{_over(problem.kv_dtype)} variants"
        run.row(f"{label} right", right, "variants", reference=tried or None, goal=1,
                note=f"{unbuilt} don't build")  # fmt: skip
        for fault in wrong:
            run.row(f"{label} wrong", 0, "", note=fault)


def _cases(name: BackendName, target: KernelTarget) -> Iterator[Case]:
    """Yield the suite's cases, in bfloat16 if the backend refuses float32."""
    for case in CASES:
        if case.dtype == "float32" and backend_module(name).refusal(_problem(case), target) is not None:
            yield dataclasses.replace(case, name=f"{case.name}, bfloat16", dtype="bfloat16")
        else:
            yield case


def _problem(case: Case) -> Problem:
    dtype, kv_dtype = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    return Problem(case.heads, case.kv_heads, case.head_dim, case.page_size, dtype, kv_dtype)


def _fault(
    case: Case, name: BackendName, run: SectionRun, blocks: frozenset[tuple[str, str, int]] = frozenset()
) -> str | None:
    try:
        batch = make_batch(case)
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        options = {"scale": scale, "window": case.window, "soft_cap": case.soft_cap, "decode_only": case.decode_only}
        target = dataclasses.replace(target_of(run.device), blocks=blocks)
        call = jax.jit(functools.partial(paged_attention, **options, backend=Backend(name, target=target)))
        rest = (batch.page_table, batch.query_starts, batch.kv_lens, np.int32(batch.num_decodes))
        kv = _pool_of(case, batch, _layout_platform(name, run))
        out, _ = call(batch.q, batch.k, batch.v, kv, np.int32(case.layer), *rest, np.int32(batch.num_seqs),
                      sinks=batch.sinks)  # fmt: skip
        expected = naive.attention(case, batch)
        error = float(np.abs(np.asarray(out)[: len(expected)].astype(np.float64) - expected).max(initial=0.0))
    except Exception as error:  # a kernel that can't run counts as wrong
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
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
            seconds = _seconds(run, label, name, [(context, 1)] * batch, page_size, kv_dtype, decode_only=True)
            if seconds is None:
                continue
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
            seconds = _seconds(run, label, name, [(length, length)], page_size, kv_dtype, decode_only=False)
            if seconds is None:
                continue
            rate = 4 * HEADS * HEAD_DIM * length * length / 2 / seconds / 1e12
            note = "goal: 450 TFLOP/s" if kv_dtype == _BF16 and not run.tiny else ""
            run.row(label, rate, "TFLOP/s", reference=run.found(MATMUL), note=note)


def _over(kv_dtype: np.dtype) -> str:
    return " over fp8" if kv_dtype == _FP8 else ""


def _usable(run: SectionRun, kv_dtype: np.dtype) -> Iterator[BackendName]:
    """Yield the kernels that support this device; the portable one only if there is no other."""
    problem = Problem(HEADS, KV_HEADS, HEAD_DIM, 16, _BF16, kv_dtype)
    able = [
        name for name in get_args(BackendName) if backend_module(name).refusal(problem, target_of(run.device)) is None
    ]
    yield from [name for name in able if name != "reference"] or able


def _seconds(
    run: SectionRun,
    label: str,
    name: BackendName,
    rows: list[tuple[int, int]],
    page_size: int,
    kv_dtype: np.dtype,
    *,
    decode_only: bool,
) -> float | None:
    """Return the seconds of a call; if it fails, report that and return None."""
    try:
        return _measure(run, name, rows, page_size, kv_dtype, decode_only)
    except Exception as error:  # the errors of compilers have no common base class
        run.row(f"{label}: failed", 0, "", note=f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
        return None


def _measure(
    run: SectionRun,
    name: BackendName,
    rows: list[tuple[int, int]],
    page_size: int,
    kv_dtype: np.dtype,
    decode_only: bool,
) -> float:
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
    kv = layout.paged_kv(*(jnp.zeros(shape, layout.dtype) for shape in (layout.shape, layout.values_shape)), scales)
    ids = np.random.default_rng(0).permutation(sum(used)).astype(np.int32)
    page_table = np.zeros((len(rows), max(used)), np.int32)
    for row, pages in enumerate(np.split(ids, np.cumsum(used)[:-1])):
        page_table[row, : len(pages)] = pages
    new = [count for _, count in rows]
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    queries = jax.random.normal(jax.random.key(0), (sum(new), HEADS, HEAD_DIM), jnp.bfloat16)
    fresh = jnp.ones((sum(new), KV_HEADS, HEAD_DIM), jnp.bfloat16)
    lengths = np.array([length for length, _ in rows], np.int32)
    facts = jax.device_put((np.int32(0), page_table, starts, lengths, np.int32(len(rows) if decode_only else 0),
                            np.int32(len(rows))))  # fmt: skip
    call = jax.jit(
        functools.partial(
            paged_attention,
            scale=HEAD_DIM**-0.5,
            decode_only=decode_only,
            backend=Backend(name, target=target_of(run.device)),
        ),
        donate_argnums=3,
    )
    seconds, _ = seconds_per_call(
        lambda state: call(queries, fresh, fresh, state[1], *facts), (queries, kv), calls=1 if run.tiny else 20
    )
    return seconds
