"""Measures a prompt's gated delta nets on this CPU: chunked, and in three other ways, bfloat16.

A program has the calls of all gated delta nets of a model, with the heads of Qwen3.5-0.8B or of Qwen3-Next on one of two
shards. The prompt is computed

- chunked: by one call of backend `cpu` a layer,
- by decodes: by one call of the same kernel for each token of a layer, in a loop inside the program,
- by XLA's scan: the recurrence as it is written, after a convolution over all tokens,
- by `reference`: by one call a layer.

All run in turn, so that other activity of the machine affects them alike.

    python -m benchmarks.gated_delta --rounds 9
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.cli.common.table import format_table
from pallas_kernels.cpu import cpu_features
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.gated_delta import BLOCK, DeltaLayout, DeltaRows, DeltaStates, DeltaWeights, gated_delta
from pallas_kernels.gated_delta.reference import Prepared, prepare

TOKENS, LAYERS, TAPS, DIM = 512, 18, 4, 128
OUTPUT = Path(__file__).parent / "results/cpu/gated_delta.json"
_WARM_UP = 2
_SLOW_ROUNDS = 3
"""The rounds of what takes a second."""


class Shape(NamedTuple):
    """The heads of a model's gated delta nets."""

    key_heads: int
    value_heads: int

    def __str__(self) -> str:
        return f"{self.key_heads} key heads, {self.value_heads} value heads"


class Prompt(NamedTuple):
    """What all layers compute with."""

    products: jax.Array
    gates: jax.Array
    weights: DeltaWeights


Form = Callable[[Prompt, DeltaStates, jax.Array], tuple[jax.Array, DeltaStates]]
SHAPES = (Shape(16, 16), Shape(16, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default=str(OUTPUT))
    args = parser.parse_args()
    report: dict[str, Any] = {"rounds": args.rounds, "machine_load_at_start": os.getloadavg()[0], "shapes": []}
    rows = []
    for shape in SHAPES:
        found = measure(shape, args.rounds)
        report["shapes"].append({"shape": str(shape), "tokens": TOKENS, "layers": LAYERS, **found})
        least = found["chunked"]["ms"]
        for name, times in found.items():
            rows.append(
                [str(shape), name, f"{times['ms']:.1f} ({times['least_ms']:.1f})", f"{times['ms'] / least:.1f}"]
            )
    print(format_table(("", "form", "ms", "times"), rows))
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


def measure(shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median and the least milliseconds of a prompt in each form."""
    forms: dict[str, Form] = {
        "chunked": _by_calls("cpu", TOKENS),
        "decodes": _by_calls("cpu", 1),
        "XLA's scan": _by_scan,
        "reference": _by_calls("reference", TOKENS),
    }
    runs = {name: compiled(shape, step) for name, step in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(_WARM_UP + rounds):
        for name, run in runs.items():
            if name in ("chunked", "decodes") or i < 1 + _SLOW_ROUNDS:
                begin = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - begin))
    kept = {name: some[_WARM_UP if len(some) > 1 + _SLOW_ROUNDS else 1 :] for name, some in times.items()}
    return {name: {"ms": statistics.median(some), "least_ms": min(some)} for name, some in kept.items()}


def compiled(shape: Shape, form: Form) -> Callable[[], None]:
    """Compile a prompt in one form; return a function that computes it."""
    layout = DeltaLayout(LAYERS, *shape, DIM, DIM, TAPS, np.dtype(jnp.bfloat16))
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def numbers(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(next(keys), sizes, dtype)

    prompt = Prompt(
        numbers(TOKENS, layout.key_heads, layout.width),
        numbers(TOKENS, layout.key_heads, 2, layout.group),
        DeltaWeights(
            numbers(layout.key_heads, layout.width, TAPS),
            numbers(layout.value_heads, dtype=jnp.float32),
            numbers(layout.value_heads, dtype=jnp.float32),
        ),
    )
    recurrent, tails = layout.pool_shapes(1)
    *entries, inputs = layout.slot_shapes(1)
    kinds = [recurrent, *entries]
    first, *others = (jnp.zeros(one, jnp.float32) for one in kinds)
    states = DeltaStates(first, jnp.zeros(tails, jnp.bfloat16), *others, jnp.zeros(inputs, jnp.bfloat16))

    def all_layers(states: DeltaStates, prompt: Prompt) -> tuple[jax.Array, DeltaStates]:
        def add(layer: jax.Array, carry: tuple[jax.Array, DeltaStates]) -> tuple[jax.Array, DeltaStates]:
            out, states = form(prompt, carry[1], layer)
            return carry[0] + out, states

        zeros = jnp.zeros((TOKENS, layout.value_heads, DIM), jnp.bfloat16)
        return lax.fori_loop(0, LAYERS, add, (zeros, states))

    program = jax.jit(all_layers, donate_argnums=0).lower(states, prompt).compile(_compiler_options())
    held = [states]

    def run() -> None:
        out, held[0] = program(held[0], prompt)
        jax.block_until_ready((out, held[0]))

    return run


def _by_calls(backend: BackendName, count: int) -> Form:
    """Return the form that computes `count` tokens a call."""

    def form(prompt: Prompt, states: DeltaStates, layer: jax.Array) -> tuple[jax.Array, DeltaStates]:
        def call(states: DeltaStates, i: jax.Array) -> tuple[DeltaStates, jax.Array]:
            tokens = [lax.dynamic_slice_in_dim(x, i * count, count) for x in (prompt.products, prompt.gates)]
            rows = _rows(i * count, count)
            out, states = gated_delta(*tokens, prompt.weights, states, layer, rows, Backend(backend))
            return states, out

        if count == TOKENS:
            states, out = call(states, jnp.int32(0))
        else:
            states, out = lax.scan(call, states, jnp.arange(TOKENS // count, dtype=jnp.int32))
        return out.reshape(TOKENS, *out.shape[-2:]), states

    return form


def _by_scan(prompt: Prompt, states: DeltaStates, layer: jax.Array) -> tuple[jax.Array, DeltaStates]:
    """Compute the recurrence token by token, in XLA."""
    tokens = prepare(*prompt, states, layer, _rows(jnp.int32(0), TOKENS))

    def add(state: jax.Array, token: Prepared) -> tuple[jax.Array, jax.Array]:
        state = jnp.exp(token.decay)[:, None, None] * state
        delta = token.beta[:, None] * (token.v - jnp.einsum("hdv,hd->hv", state, token.k))
        state = state + token.k[:, :, None] * delta[:, None]
        return state, jnp.einsum("hdv,hd->hv", state, token.q)

    state, out = lax.scan(add, jnp.zeros(states.recurrent.shape[2:], jnp.float32), tokens)
    recurrent = lax.dynamic_update_index_in_dim(states.recurrent, state[None], layer, 0)
    return out.astype(jnp.bfloat16), dataclasses.replace(states, recurrent=recurrent)


def _rows(begin: jax.Array, count: int) -> DeltaRows:
    """Return the row of one sequence that gets `count` tokens."""
    one = jnp.ones(1, jnp.int32)
    begins = one * begin
    return DeltaRows(
        slots=0 * one,
        query_starts=jnp.array([0, count], jnp.int32),
        lens=begins,
        folded=begins // BLOCK * BLOCK,
        certain=begins + count,
        sources=0 * one,
        targets=0 * one,
        snapshots=-one,
        snapshot_lens=0 * one,
        num_seqs=jnp.int32(1),
        decode_only=count == 1,
    )


def _compiler_options() -> dict[str, int]:
    """Return the compiler options of the engine."""
    return {"xla_cpu_prefer_vector_width": 512} if "avx512f" in cpu_features() else {}


if __name__ == "__main__":
    main()
