"""Measures the gated delta nets of a prompt of 512 tokens on this CPU: chunked, and in four other ways, bfloat16.

A program has the calls of the 18 gated delta nets of Qwen3.5-0.8B, or of as many with twice the value heads:

- chunked: one call of backend `cpu` for each layer,
- decodes: one call of the same kernel for each token and layer, all layers of a token before the next, as steps do,
- decodes of each layer: the same calls, all tokens of a layer before the next, so that its state stays in the cache,
- XLA's scan: the recurrence over tokens as it is written, after a convolution over all of them,
- reference: one call of backend `reference` for each layer.

All run in turn, so that other activity of the machine affects them alike. The processor's time has that of all threads.

    python -m benchmarks.gated_delta --rounds 9
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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


class Heads(NamedTuple):
    """The heads of a gated delta net."""

    key_heads: int
    value_heads: int

    def __str__(self) -> str:
        return f"{self.key_heads} key heads, {self.value_heads} value heads"


class Prompt(NamedTuple):
    """What all layers compute with."""

    products: jax.Array
    gates: jax.Array
    weights: DeltaWeights


Found = tuple[jax.Array, DeltaStates]
HEADS = (Heads(16, 16), Heads(16, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default=str(OUTPUT))
    args = parser.parse_args()
    report: dict[str, Any] = {"rounds": args.rounds, "machine_load_at_start": os.getloadavg()[0], "shapes": []}
    rows = []
    for heads in HEADS:
        found = measure(heads, args.rounds)
        report["shapes"].append({"shape": str(heads), "tokens": TOKENS, "layers": LAYERS, **found})
        ours = found["chunked"]
        for name, times in found.items():
            ratios = [f"{times[key] / ours[key]:.1f}" for key in ("ms", "cpu_ms")]
            rows.append([str(heads), name, *(f"{times[key]:.0f}" for key in times), *ratios])
    head = ("", "form", "ms", "least ms", "processor ms", "least processor ms", "times ms", "times processor ms")
    print(format_table(head, rows))
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n")


def measure(heads: Heads, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median and the least milliseconds of a prompt in each form, by the clock and of the processor."""
    forms: dict[str, Callable[[Prompt, DeltaStates], Found]] = {
        "chunked": functools.partial(_by_layer, functools.partial(_one_call, "cpu")),
        "decodes": _by_token,
        "decodes of each layer": functools.partial(_by_layer, _one_call_each),
        "XLA's scan": functools.partial(_by_layer, _scan),
        "reference": functools.partial(_by_layer, functools.partial(_one_call, "reference")),
    }
    runs = {name: compiled(heads, form) for name, form in forms.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter(), time.process_time()
            run()
            if i:
                times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    found = {}
    for name, some in times.items():
        clock, processor = ([1e3 * seconds for seconds in column] for column in zip(*some, strict=True))
        found[name] = {
            "ms": statistics.median(clock),
            "least_ms": min(clock),
            "cpu_ms": statistics.median(processor),
            "least_cpu_ms": min(processor),
        }
    return found


def compiled(heads: Heads, form: Callable[[Prompt, DeltaStates], Found]) -> Callable[[], None]:
    """Compile a prompt in one form; return a function that computes it."""
    layout = DeltaLayout(LAYERS, *heads, DIM, DIM, TAPS, np.dtype(jnp.bfloat16))
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
    kinds = [(recurrent, jnp.float32), (tails, jnp.bfloat16), *((shape, jnp.float32) for shape in entries)]
    states = DeltaStates(*(jnp.zeros(shape, dtype) for shape, dtype in (*kinds, (inputs, jnp.bfloat16))))
    held = [states]
    program = jax.jit(form, donate_argnums=1).lower(prompt, states).compile(_compiler_options())

    def run() -> None:
        out, held[0] = program(prompt, held[0])
        jax.block_until_ready((out, held[0]))

    return run


def _by_layer(one: Callable[..., Found], prompt: Prompt, states: DeltaStates) -> Found:
    """Compute the layers by `one(prompt, states, layer)`; return the sum of their outputs."""

    def add(layer: jax.Array, before: Found) -> Found:
        out, states = one(prompt, before[1], layer)
        return before[0] + out, states

    tokens, value_heads = len(prompt.products), states.recurrent.shape[2]
    return lax.fori_loop(0, LAYERS, add, (jnp.zeros((tokens, value_heads, DIM), jnp.bfloat16), states))


def _by_token(prompt: Prompt, states: DeltaStates) -> Found:
    """Compute the tokens one by one, each in all layers."""

    def add(states: DeltaStates, position: jax.Array) -> tuple[DeltaStates, jax.Array]:
        out, states = _by_layer(functools.partial(_one_call, "cpu", begin=position), _token(prompt, position), states)
        return states, out[0]

    states, out = lax.scan(add, states, jnp.arange(TOKENS, dtype=jnp.int32))
    return out, states


def _one_call_each(prompt: Prompt, states: DeltaStates, layer: jax.Array) -> Found:
    """Compute a layer token by token."""

    def add(states: DeltaStates, position: jax.Array) -> tuple[DeltaStates, jax.Array]:
        out, states = _one_call("cpu", _token(prompt, position), states, layer, position)
        return states, out[0]

    states, out = lax.scan(add, states, jnp.arange(TOKENS, dtype=jnp.int32))
    return out, states


def _token(prompt: Prompt, position: jax.Array) -> Prompt:
    tokens = (lax.dynamic_slice_in_dim(x, position, 1) for x in (prompt.products, prompt.gates))
    return Prompt(*tokens, prompt.weights)


def _one_call(
    backend: BackendName, prompt: Prompt, states: DeltaStates, layer: jax.Array, begin: jax.Array | int = 0
) -> Found:
    """Compute the tokens from position `begin` on in one call."""
    return gated_delta(*prompt, states, layer, _rows(begin, len(prompt.products)), Backend(backend))


def _scan(prompt: Prompt, states: DeltaStates, layer: jax.Array) -> Found:
    """Compute the recurrence in XLA."""

    def add(state: jax.Array, token: Prepared) -> tuple[jax.Array, jax.Array]:
        state = jnp.exp(token.decay)[:, None, None] * state
        delta = token.beta[:, None] * (token.v - jnp.einsum("hdv,hd->hv", state, token.k))
        state = state + token.k[:, :, None] * delta[:, None]
        return state, jnp.einsum("hdv,hd->hv", state, token.q)

    tokens = prepare(*prompt, states, layer, _rows(0, TOKENS))
    state, out = lax.scan(add, jnp.zeros(states.recurrent.shape[2:], jnp.float32), tokens)
    recurrent = lax.dynamic_update_index_in_dim(states.recurrent, state[None], layer, 0)
    return out.astype(jnp.bfloat16), dataclasses.replace(states, recurrent=recurrent)


def _rows(begin: jax.Array | int, count: int) -> DeltaRows:
    """Return the row of a sequence of `begin` tokens that gets `count` more."""
    zero = jnp.zeros(1, jnp.int32)
    return DeltaRows(
        slots=zero,
        query_starts=jnp.array([0, count], jnp.int32),
        lens=zero + begin,
        folded=(zero + begin) // BLOCK * BLOCK,
        certain=zero + begin + count,
        sources=zero,
        targets=zero,
        snapshots=zero - 1,
        snapshot_lens=zero,
        num_seqs=jnp.int32(1),
        decode_only=count == 1,
    )


def _compiler_options() -> dict[str, int]:
    """Return the compiler options of the engine."""
    return {"xla_cpu_prefer_vector_width": 512} if "avx512f" in cpu_features() else {}


if __name__ == "__main__":
    main()
