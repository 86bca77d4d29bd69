"""Products with quantized weights on the device: correctness, then speed beside reading the bytes and beside bf16."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from device_sections.machine import COPY
from device_sections.run import SectionRun, seconds_per_call
from pallas_kernels.quantized_matmul import Backend, QuantizedWeight, Scheme, choose_backend, make_weight
from pallas_kernels.quantized_matmul import quantized_matmul as multiply
from pallas_kernels.quantized_matmul.backends import BackendName, backend_module
from pallas_kernels.target import target_of
from tests.pallas_kernels.quantized_matmul.cases import CASES, Case, make_product

# Of a Llama-3.1-8B: the output projection of attention, and gate and up as one weight.
_SHAPES = ((4096, 4096), (28672, 4096))
_ROWS = (1, 16, 64, 2048)
_SCHEMES = {
    "int4": Scheme("int4", 128, zeros=True),
    "int8": Scheme("int8", 128),
    "fp8 token": Scheme("fp8", activations="token"),
    "fp8 blocks": Scheme("fp8", 128, activations="group"),
    "int8 token": Scheme("int8", activations="token"),
}
_TINY_CASES = 2
_TOLERANCE = 1e-5
"""Of the sum of the magnitudes of all terms: float32 sums of thousands."""


def correctness(run: SectionRun) -> None:
    """Compare every backend with float64 on every case of the test suite that it supports here."""
    target = target_of(run.device)
    for name in get_args(BackendName):
        if name == "mosaic_tpu" and target.platform != "tpu":
            continue
        refused, right, wrong, skipped = 0, 0, [], 0
        for case in CASES:
            if backend_module(name).refusal(int(np.prod(case.out)), case.inputs, case.scheme, target) is not None:
                refused += 1
            elif run.left < 5 or (run.tiny and right + len(wrong) >= _TINY_CASES):
                skipped += 1
            elif (fault := _fault(case, Backend(name, target))) is None:
                right += 1
            else:
                wrong.append(f"{case}: {fault}")
        note = f"{refused} refused, {skipped} not tried"
        run.row(f"{name}: cases right", right, "cases", reference=right + len(wrong) or None, goal=1, note=note)
        for fault in wrong:
            run.row(f"{name}: wrong", 0, "", note=fault)


def _fault(case: Case, backend: Backend) -> str | None:
    made = make_product(case, backend)
    try:
        found = np.asarray(jax.jit(multiply)(jnp.asarray(made.x), made.weight), np.float64)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    worst = float((np.abs(found - made.expected) / made.magnitude).max())
    return None if worst < _TOLERANCE else f"error {worst:.1e} of the terms' magnitudes"


def products(run: SectionRun) -> None:
    """Measure products of a few rows, bound by reading the weight, and of many; the goal is set by bf16."""
    target = target_of(run.device)
    shapes, rows = (((64, 256),), (1,)) if run.tiny else (_SHAPES, _ROWS)
    copy = run.found(COPY)
    for out_dim, in_dim in shapes:
        for count in rows:
            x = jax.random.normal(jax.random.key(0), (count, in_dim), jnp.bfloat16)
            dense = jnp.full((out_dim, in_dim), 0.01, jnp.bfloat16)
            usual = _seconds(run, x, dense)
            label = f"{count} x {in_dim} x {out_dim}"
            _report(run, f"bf16 {label}", usual, dense.nbytes, copy, None)
            for name, scheme in _SCHEMES.items():
                backend = choose_backend(out_dim, in_dim, scheme, target)
                if run.left < 10 or backend.name == "reference":
                    continue
                weight = _weight((out_dim, in_dim), scheme, backend)
                size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
                _report(run, f"{name} ({backend.name}) {label}", _seconds(run, x, weight), size, copy, usual)


def _report(run: SectionRun, label: str, seconds: float, nbytes: int, copy: float | None, usual: float | None) -> None:
    note = f"{seconds * 1e6:.1f} us" + ("" if usual is None else f", {usual / seconds:.2f} x bf16")
    run.row(label, nbytes / seconds / 1e9, "GB/s", reference=copy, note=note)


def _weight(shape: tuple[int, int], scheme: Scheme, backend: Backend) -> QuantizedWeight:
    return make_weight(shape, scheme, backend, lambda shape, dtype: jnp.ones(shape, jnp.int8).astype(dtype))


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
