"""Mixtures of experts on the device: correctness, then speed beside a copy's bandwidth and the rate of products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from device_sections.machine import COPY, MATMUL
from device_sections.run import SectionRun, seconds_per_call
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.expert_routing import Routing, choose_experts, group_by_expert
from pallas_kernels.grouped_matmul import BACKENDS, grouped_matmul
from pallas_kernels.grouped_matmul.tuning import Experts
from pallas_kernels.quantized_matmul import Scheme
from pallas_kernels.target import CPU, KernelTarget, target_of
from pallas_kernels.tune.experts import MixtureShape, make_step
from tests.pallas_kernels.grouped_matmul.cases import CASES, Case, make_case

_MODELS = {
    "Qwen3-30B-A3B": MixtureShape(128, 8, 2048, 768, (None, Scheme("fp8", 128, activations="group"))),
    "gpt-oss-120b": MixtureShape(128, 4, 2880, 2880, (Scheme("fp4", 32),)),
    "Mixtral-8x7B": MixtureShape(8, 2, 4096, 14336, (None, Scheme("int4", 128, zeros=True))),
}
_TINY = {"tiny": MixtureShape(4, 2, 128, 128, (None,))}
_BACKENDS: dict[str, tuple[BackendName, ...]] = {"cpu": ("triton",), "tpu": ("mosaic_tpu",)}
_TOKENS = (1, 8, 64, 2048)
_LARGE = 2048
# This many products take turns, each of other experts, so that few experts are in a cache.
_TURNS = 8


def check_defaults(run: SectionRun) -> None:
    """Compare the default backend with float64 on every case of the test suite, and routing with XLA's."""
    target = target_of(run.device)
    chosen = BACKENDS.choose(target, (CASES[0].outputs, CASES[0].inputs, CASES[0].scheme)).name
    _compare(run, _BACKENDS["cpu"][0] if chosen == "reference" else chosen)
    with run.reporting("routing"):
        logits = jax.random.normal(jax.random.key(0), (4 if run.tiny else 500, 128))
        found, expected = (jax.jit(_route, static_argnums=1)(logits, of) for of in (target, CPU))
        same = [bool((a == b).all()) for a, b in zip(found, expected, strict=True)]
        run.row("routing: arrays as XLA's", sum(same), "arrays", reference=len(same), goal=1)


def correctness(run: SectionRun) -> None:
    """Compare every kernel with float64 on every case that it supports here, each in a process of its own."""
    if not run.part:
        run.in_processes(_BACKENDS.get(target_of(run.device).platform, ("mosaic_gpu", "triton")))
    else:
        _compare(run, run.part)


def _compare(run: SectionRun, name: Any) -> None:
    target = target_of(run.device)
    taken = [case for case in CASES if BACKENDS.refusal(name, target, (case.outputs, case.inputs, case.scheme)) is None]
    checks = {str(case): functools.partial(_fault, case, Backend(name, target)) for case in taken}
    run.compare(f"experts, {name}", checks, len(CASES) - len(taken))


def _route(logits: jax.Array, target: KernelTarget) -> list[jax.Array]:
    ids, _ = choose_experts(logits, None, Routing(8, renormalize=True), target)
    return [ids, *jax.tree.leaves(group_by_expert(ids, logits.shape[1], target))]


def _fault(case: Case, backend: Backend) -> str | None:
    x, weight, groups, bias, expected, allowed = make_case(case, backend)
    options: dict[str, Any] = {"bias": bias, "gate": case.gate, "of_tokens": case.of_tokens}
    options |= {"target": backend.target, "backend": backend}
    out = jax.jit(lambda *arguments: grouped_matmul(*arguments, **options))(x, weight, groups)
    found = np.asarray(out, np.float64)[: len(expected)]
    if (np.abs(found - expected) <= allowed).all():
        return None
    return f"error {np.nanmax(np.abs(found - expected) / allowed):.1e} of what is allowed"


def products(run: SectionRun) -> None:
    """Measure up and down products with random choices: bytes of touched experts a second, then products a second."""
    target = target_of(run.device)
    for tokens in (4,) if run.tiny else _TOKENS:
        logits = jax.random.normal(jax.random.key(0), (tokens, 128))
        routed = jax.jit(lambda x: x + sum(leaf.sum() for leaf in _route(x, target)) * 1e-9)
        seconds, _ = seconds_per_call(routed, logits, calls=3 if run.tiny else 200)
        run.row(f"routing, {tokens} tokens, 8 of 128", seconds * 1e6, "us")
    for name, model in (_TINY if run.tiny else _MODELS).items():
        for scheme in model.schemes:
            for gated in (True, False):
                out_dim, in_dim = (2 * model.ffn, model.dim) if gated else (model.dim, model.ffn)
                experts = Experts(model.experts, out_dim, in_dim, gated, scheme)
                _measure(run, f"{name} {'up' if gated else 'down'}", experts, model.choices, target)


def _measure(run: SectionRun, name: str, experts: Experts, choices: int, target: KernelTarget) -> None:
    backend = BACKENDS.choose(target, (experts.out_dim, experts.in_dim, experts.scheme))
    kind = "bf16" if experts.scheme is None else experts.scheme.numbers
    nbytes = experts.out_dim * experts.in_dim * (16 if experts.scheme is None else experts.scheme.bits) / 8
    turns = 1 if run.tiny else _TURNS
    for tokens in (1,) if run.tiny else _TOKENS:
        label = f"{name} {kind} ({backend.name}), {tokens} tokens"
        if run.left < 5 or (backend.name == "reference" and not run.tiny):
            run.row(f"{label}: not tried", 0, "", note="no time was left" if run.left < 5 else "no kernel takes it")
            continue
        with run.reporting(label):
            step, x, read = make_step(experts, tokens, choices, turns, backend)
            seconds, _ = seconds_per_call(step, x, calls=3 if run.tiny else 20)
            note = f"{seconds / turns * 1e6:.1f} us"
            if tokens < _LARGE:
                run.row(label, read * nbytes / seconds / 1e9, "GB/s", reference=run.found(COPY), note=note)
            else:
                rate = 2 * turns * tokens * choices * experts.out_dim * experts.in_dim / seconds / 1e12
                run.row(label, rate, "TFLOP/s", reference=run.found(MATMUL), note=note)
