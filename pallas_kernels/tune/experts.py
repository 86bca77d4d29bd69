"""Products of mixtures of experts: the layers of common models, with few tokens and with many."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.expert_routing.reference import group_by_expert
from pallas_kernels.grouped_matmul import BACKENDS, Gate, Groups, grouped_matmul
from pallas_kernels.grouped_matmul.tuning import Experts
from pallas_kernels.quantized_matmul import QuantizedWeight, Scheme, make_weight
from pallas_kernels.target import KernelTarget
from pallas_kernels.tune.task import Task, random_array, seconds_a_step
from pallas_kernels.tuning import Kind


@dataclasses.dataclass(frozen=True)
class MixtureShape:
    """The experts of a layer: gate and up `[ffn, dim]` each and down `[dim, ffn]`, of which a token chooses some."""

    experts: int
    choices: int
    dim: int
    ffn: int
    schemes: tuple[Scheme | None, ...]


_FP8 = Scheme("fp8", 128, activations="group")
# Qwen3-30B-A3B, Qwen3-235B-A22B on four devices, Mixtral-8x7B, gpt-oss-120b and -20b.
MODELS = (
    MixtureShape(128, 8, 2048, 768, (None, _FP8, Scheme("int4", 128))),
    MixtureShape(32, 2, 4096, 1536, (None, _FP8)),
    MixtureShape(8, 2, 4096, 14336, (None, Scheme("int4", 128, zeros=True))),
    MixtureShape(128, 4, 2880, 2880, (Scheme("fp4", 32),)),
    MixtureShape(32, 4, 2880, 2880, (Scheme("fp4", 32),)),
)
TINY = (MixtureShape(4, 2, 256, 128, (Scheme("int4", 128),)),)
TOKENS: dict[Kind, int] = {"decode": 16, "prefill": 4096}
TINY_TOKENS: dict[Kind, int] = {"decode": 2, "prefill": 40}
# The number of products that run in turn, so that no cache has the experts of the next one.
_TURNS = 8


def tasks(backend: BackendName, target: KernelTarget, *, tiny: bool) -> Iterator[Task]:
    """Yield the tasks to time; with `tiny`, those that interpret mode computes in seconds."""
    module: Any = BACKENDS.module(backend)
    tokens = TINY_TOKENS if tiny else TOKENS
    for model, (kind, count), gated in itertools.product(TINY if tiny else MODELS, tokens.items(), (True, False)):
        for scheme in model.schemes:
            out_dim, in_dim = (2 * model.ffn, model.dim) if gated else (model.dim, model.ffn)
            experts = Experts(model.experts, out_dim, in_dim, gated, scheme)
            yield Task(
                kind,
                experts.facts(),
                BACKENDS.refusal(backend, target, (out_dim, in_dim, scheme)),
                module.candidates(kind)[: 2 if tiny else None],
                functools.partial(_seconds, backend, experts, count, model.choices, 1 if tiny else _TURNS),
            )


def make_experts(experts: Experts, backend: Backend) -> Any:
    """Return a random weight."""
    shape = experts.count, experts.out_dim, experts.in_dim
    if experts.scheme is None:
        return random_array(shape, jnp.bfloat16)
    flat = make_weight((experts.count * experts.out_dim, experts.in_dim), experts.scheme, backend, random_array)
    return flat.reshape(*shape)


def make_step(
    experts: Experts, tokens: int, choices: int, turns: int, backend: Backend
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array, int]:
    """Return a step, its inputs, and the number of experts that it reads. A step takes and returns inputs; it runs
    products in turn, each of other random choices."""
    rng, weight = np.random.default_rng(0), make_experts(experts, backend)
    chosen = [np.argsort(rng.random((tokens, experts.count)), axis=1)[:, :choices] for _ in range(turns)]
    groups = [group_by_expert(jnp.asarray(one, jnp.int32), experts.count) for one in chosen]
    options: dict[str, Any] = {"of_tokens": experts.gated, "gate": Gate() if experts.gated else None}
    options |= {"target": backend.target, "backend": backend, "one_pass": True}

    @jax.jit
    def multiply(x: jax.Array, weight: jax.Array | QuantizedWeight, groups: list[Groups]) -> jax.Array:
        for one in groups:
            # The next product waits for this one.
            out = grouped_matmul(x, weight, one, out_dtype=x.dtype, **options)
            x = x + out[: len(x), :1] * jnp.asarray(1e-6, x.dtype)
        return x

    x = random_array((tokens if experts.gated else tokens * choices, experts.in_dim), jnp.bfloat16)
    return lambda x: multiply(x, weight, groups), x, sum(len(np.unique(one)) for one in chosen)


def _seconds(
    backend: BackendName, experts: Experts, tokens: int, choices: int, turns: int, target: KernelTarget
) -> float:
    step, x, _ = make_step(experts, tokens, choices, turns, Backend(backend, target))
    return seconds_a_step(step, x, turns) / turns
