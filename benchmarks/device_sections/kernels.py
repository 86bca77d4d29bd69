"""Paged attention as the device runs it: right on every case of the suite, then how fast."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from device_sections.machine import COPY, MATMUL
from device_sections.run import Run, seconds_per_call
from pallas_kernels.paged_attention import Backend, BackendName, Problem, Target, kv_layout, paged_attention, target_of
from pallas_kernels.paged_attention.backends import backend_module
from pallas_kernels.paged_attention.layout import in_lanes
from tests.pallas_kernels.paged_attention import naive
from tests.pallas_kernels.paged_attention.cases import CASES, Batch, Case, make_batch

# Heads of a Llama-3.1-8B.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}
_TINY_CASES = 2
_LLAMA_LIKE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 64, "dtype": "bfloat16"}
_VARIED = {
    "decode": Case("decode", ((300, 1), (17, 1), (129, 1)), 3, decode_only=True, **_LLAMA_LIKE),
    "prefill": Case("prefill", ((130, 130), (140, 12), (300, 70)), 0, **_LLAMA_LIKE),
}


def correctness(run: Run) -> None:
    """Every backend on every case that it doesn't refuse here, natively, against float64."""
    target = target_of(run.device)
    for name in get_args(BackendName):
        refused, wrong, right, skipped = 0, [], 0, 0
        for case in _cases(name, target):
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
        if hasattr(backend_module(name), "candidates"):
            _variants(run, name, target)


def _variants(run: Run, name: BackendName, target: Target) -> None:
    """Every set of block sizes that tuning may choose, such as those whose weights stay in registers, on one case."""
    for kind, case in _VARIED.items():
        problem = _problem(case)
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
        tried = right + len(wrong)
        run.row(f"{name}: {kind} variants right", right, "variants", reference=tried or None, goal=1,
                note=f"{unbuilt} don't build")  # fmt: skip
        for fault in wrong:
            run.row(f"{name}: wrong {kind} variant", 0, "", note=fault)


def _cases(name: BackendName, target: Target) -> Iterator[Case]:
    """The suite's, and in bfloat16 those that a backend refuses in float32; models are in bfloat16."""
    for case in CASES:
        if case.dtype == "float32" and backend_module(name).refusal(_problem(case), target) is not None:
            yield dataclasses.replace(case, name=f"{case.name}, bfloat16", dtype="bfloat16")
        else:
            yield case


def _problem(case: Case) -> Problem:
    dtype, kv_dtype = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    return Problem(case.heads, case.kv_heads, case.head_dim, case.page_size, dtype, kv_dtype)


def _fault(
    case: Case, name: BackendName, run: Run, blocks: frozenset[tuple[str, str, int]] = frozenset()
) -> str | None:
    try:
        batch = make_batch(case)
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        options = {"scale": scale, "window": case.window, "soft_cap": case.soft_cap, "decode_only": case.decode_only}
        call = jax.jit(
            functools.partial(paged_attention, **options, backend=Backend(name, target=target_of(run.device)))
        )
        rest = (batch.page_table, batch.query_starts, batch.kv_lens, np.int32(batch.num_decodes))
        kv = _pool_of(case, batch, _layout_platform(name, run))
        out, _ = call(batch.q, batch.k, batch.v, kv, np.int32(case.layer), *rest, np.int32(batch.num_seqs),
                      sinks=batch.sinks)  # fmt: skip
        expected = naive.attention(case, batch)
        error = float(np.abs(np.asarray(out)[: len(expected)].astype(np.float64) - expected).max(initial=0.0))
    except Exception as error:  # a kernel that can't run is a wrong one
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return None if error <= _TOLERANCE[case.dtype] else f"error {error:.3g}"


def _layout_platform(name: str, run: Run) -> str:
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
    pools = in_lanes(jnp.asarray(batch.keys), jnp.asarray(batch.values), kv)
    return kv.with_pools([pool.swapaxes(0, 1) for pool in pools] if kv.page_major else pools)


def decode(run: Run) -> None:
    """GB/s of keys and values over batch, context and page size, beside a copy's."""
    batches, contexts, pages = ((2,), (64,), (16,)) if run.tiny else ((64, 128, 256), (1024, 4096, 8192), (16, 64))
    for name in _usable(run):
        for page_size in pages:
            for context in contexts:
                for batch in batches:
                    if run.left < 10:
                        return
                    rows = [(context, 1)] * batch
                    seconds = _seconds(run, name, rows, page_size, decode_only=True)
                    read = batch * context * KV_HEADS * HEAD_DIM * 2 * 2
                    label = f"{name} decode {batch} x {context}, page {page_size}"
                    run.row(label, read / seconds / 1e9, "GB/s", reference=run.found(COPY), goal=0.8)


def prefill(run: Run) -> None:
    """TFLOP/s of one causal prompt, beside a product's."""
    for name in _usable(run):
        for page_size in (16,) if run.tiny else (16, 64):
            for length in (32,) if run.tiny else (2048, 4096, 8192, 16384):
                if run.left < 10:
                    return
                seconds = _seconds(run, name, [(length, length)], page_size, decode_only=False)
                rate = 4 * HEADS * HEAD_DIM * length * length / 2 / seconds / 1e12
                label = f"{name} prefill {length}, page {page_size}"
                run.row(
                    label, rate, "TFLOP/s", reference=run.found(MATMUL), note="" if run.tiny else "goal: 450 TFLOP/s"
                )


def _usable(run: Run) -> Iterator[BackendName]:
    """Kernels that this device has; the portable one only where there is none other."""
    problem = Problem(HEADS, KV_HEADS, HEAD_DIM, 16, np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16))
    able = [
        name for name in get_args(BackendName) if backend_module(name).refusal(problem, target_of(run.device)) is None
    ]
    yield from [name for name in able if name != "reference"] or able


def _seconds(run: Run, name: BackendName, rows: list[tuple[int, int]], page_size: int, *, decode_only: bool) -> float:
    used = [-(-length // page_size) for length, _ in rows]
    layout = kv_layout(
        num_layers=1,
        num_pages=sum(used) + 1,
        page_size=page_size,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=np.dtype(jnp.bfloat16),
        platform=_layout_platform(name, run),
    )
    kv = layout.paged_kv(*(jnp.zeros(shape, layout.dtype) for shape in (layout.shape, layout.values_shape)), None)
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
