"""Products with quantized weights on the device: correctness, then speed beside reading the bytes and beside bf16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_sections.machine import COPY
from device_sections.run import SectionRun, seconds_per_call
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.quantized_matmul import BACKENDS, QuantizedWeight, Scheme, make_weight
from pallas_kernels.quantized_matmul import quantized_matmul as multiply
from pallas_kernels.target import KernelTarget, target_of
from pallas_kernels.tune.task import random_array
from tests.pallas_kernels.quantized_matmul.cases import CASES, Case, make_product

# The output projection of a Llama-3.1-8B's attention, and its gate and up as one weight.
_SHAPES = ((4096, 4096), (28672, 4096))
_ROWS = (1, 16, 64, 2048)
_SCHEMES = {
    "int4": Scheme("int4", 128, zeros=True),
    "int8": Scheme("int8", 128),
    "fp8 token": Scheme("fp8", activations="token"),
    "fp8 blocks": Scheme("fp8", 128, activations="group"),
    "int8 token": Scheme("int8", activations="token"),
}
# Mosaic GPU's outputs are a multiple of this; cases are rounded up to it.
_TILE = 64
_TOLERANCE = 1e-5
"""The share of the sum of all terms' magnitudes by which a float32 sum of thousands may differ."""


def check_defaults(run: SectionRun) -> None:
    """Compare the default backend of every case of the test suite with float64."""
    target = target_of(run.device)

    def chosen(case: Case) -> str:
        return BACKENDS.choose(target, (int(np.prod(case.out)), case.inputs, case.scheme)).name

    for name in sorted({chosen(case) for case in CASES}):
        _compare(run, name, [case for case in CASES if chosen(case) == name])


def correctness(run: SectionRun) -> None:
    """Compare every backend with float64 on every case that it supports here, each in a process of its own."""
    target = target_of(run.device)
    cases = [dataclasses.replace(case, out=(*case.out[:-1], -(-case.out[-1] // _TILE) * _TILE)) for case in CASES]
    if not run.part:
        names = [name for name in BACKENDS.names if any(_refusal(name, case, target) is None for case in cases)]
        run.in_processes(names)
    else:
        _compare(run, run.part, cases)


def _compare(run: SectionRun, name: Any, cases: Sequence[Case]) -> None:
    target = target_of(run.device)
    taken = [case for case in cases if _refusal(name, case, target) is None]
    checks = {str(case): functools.partial(_fault, case, Backend(name, target)) for case in taken}
    run.compare(f"quantized, {name}", checks, len(cases) - len(taken))


def _refusal(name: BackendName, case: Case, target: KernelTarget) -> str | None:
    return BACKENDS.refusal(name, target, (int(np.prod(case.out)), case.inputs, case.scheme))


def _fault(case: Case, backend: Backend) -> str | None:
    made = make_product(case, backend)
    found = np.asarray(jax.jit(multiply)(jnp.asarray(made.x), made.weight), np.float64)
    worst = float((np.abs(found - made.expected) / made.magnitude).max())
    return None if worst < _TOLERANCE else f"error {worst:.1e} of the terms' magnitudes"


def products(run: SectionRun) -> None:
    """Measure products of a few rows, bound by reading the weight, and of many; the goal is set by bf16."""
    target = target_of(run.device)
    shapes, rows = (((64, 256),), (1,)) if run.tiny else (_SHAPES, _ROWS)
    copy = run.found(COPY)
    for out_dim, in_dim in shapes:
        for count in rows:
            x = random_array((count, in_dim), jnp.bfloat16)
            dense = random_array((out_dim, in_dim), jnp.bfloat16)
            usual = _seconds(run, x, dense)
            label = f"{count} x {in_dim} x {out_dim}"
            _report(run, f"bf16 {label}", usual, dense.nbytes, copy, None)
            for name, scheme in _SCHEMES.items():
                for backend in _kernels(out_dim, in_dim, scheme, target):
                    if run.left < 10:
                        return
                    with run.reporting(f"{name} ({backend.name}) {label}"):
                        weight = make_weight((out_dim, in_dim), scheme, backend, random_array)
                        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
                        seconds = _seconds(run, x, weight)
                        _report(run, f"{name} ({backend.name}) {label}", seconds, size, copy, usual)


def _kernels(out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> list[Backend]:
    """Return the backends that take a weight here, the chosen one first, without the reference."""
    names = [BACKENDS.choose(target, (out_dim, in_dim, scheme)).name, *BACKENDS.names]
    able = [name for name in names if BACKENDS.refusal(name, target, (out_dim, in_dim, scheme)) is None]
    return [Backend(name, target) for name in dict.fromkeys(able) if name != "reference"]


def _report(run: SectionRun, label: str, seconds: float, nbytes: int, copy: float | None, usual: float | None) -> None:
    note = f"{seconds * 1e6:.1f} us" + ("" if usual is None else f", {usual / seconds:.2f} x bf16")
    run.row(label, nbytes / seconds / 1e9, "GB/s", reference=copy, note=note)


def _seconds(run: SectionRun, x: Any, weight: Any) -> float:
    """Return the seconds of a product in a chain: a part of each one is added to the inputs of the next."""

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        x, weight = state
        if isinstance(weight, QuantizedWeight):
            out = multiply(x, weight, out_dtype=jnp.bfloat16)
        else:
            out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
        return x + out[:, :1] * jnp.bfloat16(1e-6), weight

    state = x + 0, jax.tree.map(lambda leaf: leaf + 0, weight)
    seconds, _ = seconds_per_call(jax.jit(step, donate_argnums=0), state, calls=3 if run.tiny else 50)
    return seconds
