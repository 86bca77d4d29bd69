"""Measures the experts of a whole step on this CPU: our kernel in every format against `lax.ragged_dot` in bfloat16.

A program has the products of the experts of 30 layers of SmolLM2-135M's sizes, 8 experts of which a token chooses 2,
with weights that exceed all caches. Reading the bytes of the touched experts is timed as their share of a copy between
two arrays, by as many threads. All run in turn, so that other activity of the machine affects them alike.

    python -m benchmarks.grouped_matmul --rounds 15
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.cli.common.table import format_table
from pallas_kernels.cpu import cpu_features
from pallas_kernels.expert_routing import Routing, choose_experts, group_by_expert
from pallas_kernels.grouped_matmul import Gate, Groups, grouped_matmul
from pallas_kernels.quantized_matmul import BLOCK, FACTORS, PackedWeight, Scheme, pack_dense, pack_numbers, packed_shape
from pallas_kernels.target import CPU

LAYERS, EXPERTS, DIM, FFN = 30, 8, 576, 1536
ROUTING = Routing(2, renormalize=True)
TOKENS = (1, 4, 16, 64, 512)
FORMATS = ("bf16", "int8", "fp8", "int4", "fp4")
_COPIED_BYTES = 2**28
_WARM_UP = 2
_SLOW_ROUNDS = 3
"""The rounds of XLA's products, which take seconds."""
OUTPUT = Path(__file__).parent / "results/cpu/grouped_matmul.json"


class Layer(NamedTuple):
    """The weights of the experts of a layer: gate and up as one weight, and down."""

    up: Any
    down: Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--output", default=str(OUTPUT))
    args = parser.parse_args()
    report: dict[str, Any] = {
        "rounds": args.rounds,
        "machine_load_at_start": os.getloadavg()[0],
        "has_avx512bf16": "avx512bf16" in cpu_features(),
        "steps": [],
    }
    layers = {format: copies(packed_layer(format)) for format in args.formats}
    dense = copies(Layer(*(jnp.asarray(one.swapaxes(1, 2)) for one in random_layer())))
    rows = []
    for tokens in args.tokens:
        found = measure(tokens, args.rounds, layers, dense)
        report["steps"].append({"tokens": tokens, **found})
        for format in layers:
            one = found[format]
            rows.append(
                [
                    f"{tokens}, {format}",
                    f"{one['ms']:.2f} ({one['least_ms']:.2f})",
                    f"{one['reading_ms']:.2f}",
                    f"{one['share_of_bandwidth']:.0%}",
                    f"{found['ragged_dot']['ms'] / one['ms']:.1f}",
                    f"{found['routing']['ms'] / one['ms']:.1%}",
                ]
            )
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n")
    print(format_table(("tokens", "ms", "bytes read, ms", "of bandwidth", "x ragged_dot", "routing"), rows))


def measure(tokens: int, rounds: int, layers: dict[str, list[Layer]], dense: list[Layer]) -> dict[str, dict[str, Any]]:
    """Return times of a step's products in each format, of XLA's products, of the routing, and of a copy."""
    x = jax.random.normal(jax.random.key(0), (tokens, DIM), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(1), (LAYERS, tokens, EXPERTS), jnp.float32)
    routes = [route(one) for one in logits]
    runs: dict[str, Callable[[], Any]] = {
        "ragged_dot": compiled(xla_step, x, routes, dense),
        "routing": compiled(lambda logits: [route(one) for one in logits], logits),
        "copy": copy(),
    }
    runs |= {format: compiled(step, x, routes, held) for format, held in layers.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + _WARM_UP):
        for name, run in runs.items():
            if name == "ragged_dot" and i >= _SLOW_ROUNDS + _WARM_UP:
                continue
            begin = time.perf_counter()
            run()
            if i >= _WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - begin))
    out: dict[str, dict[str, Any]] = {
        name: {"ms": statistics.median(some), "least_ms": min(some)} for name, some in times.items()
    }
    bandwidth = 2 * _COPIED_BYTES / out["copy"]["ms"]
    out["copy"]["gb_per_s"] = bandwidth / 1e6
    touched = sum(int((np.diff(groups.starts) > 0).sum()) for groups, _ in routes)
    for format, held in layers.items():
        nbytes = touched * sum(weight.data.nbytes for weight in held[0]) / EXPERTS
        out[format]["reading_ms"] = nbytes / bandwidth
        out[format]["share_of_bandwidth"] = nbytes / bandwidth / out[format]["ms"]
    return out


def random_layer() -> Layer:
    """Return weights of 16 bits; gate and up are together, `[experts, 2 * ffn, dim]`."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return (rng.standard_normal(shape, np.float32) * 0.03).astype(jnp.bfloat16)

    return Layer(weight(EXPERTS, 2 * FFN, DIM), weight(EXPERTS, DIM, FFN))


def packed_layer(format: Any) -> Layer:
    """Return weights in the layout of a CPU; weights of less than 16 bits are random numbers with one scale."""
    rng = np.random.default_rng(0)

    def packed(weight: np.ndarray[Any, Any]) -> PackedWeight:
        experts, outputs, inputs = weight.shape
        strips, *run = packed_shape(experts * outputs, inputs, format)
        data = np.zeros((strips, *run), np.uint8)
        if format == "bf16":
            pack_dense(weight.reshape(-1, inputs), data)
        else:
            factors = np.empty((experts * outputs, inputs // BLOCK), FACTORS)
            factors["scale"], factors["minimum"] = 0.002, -0.015
            largest = 16 if format in ("int4", "fp4") else 120
            pack_numbers(rng.integers(0, largest, (len(factors), inputs), np.uint8), factors, format, data)
        scheme = None if format == "bf16" else Scheme(format, BLOCK)
        return PackedWeight(jnp.asarray(data.reshape(experts, strips // experts, *run)), scheme=scheme)

    return Layer(*map(packed, random_layer()))


def copies(layer: Layer) -> list[Layer]:
    """Return all layers: the same weights at other addresses."""
    return [jax.tree.map(jnp.copy, layer) for _ in range(LAYERS)]


def route(logits: jax.Array) -> tuple[Groups, jax.Array]:
    """Return the rows of a layer's experts, and the weights of each token's choices."""
    ids, weights = choose_experts(logits, None, ROUTING, CPU)
    return group_by_expert(ids, EXPERTS, CPU), weights


def step(x: jax.Array, routes: Any, layers: list[Layer]) -> jax.Array:
    """Return the tokens after the experts of all layers."""
    for layer, (groups, weights) in zip(layers, routes, strict=True):
        inner = grouped_matmul(x, layer.up, groups, gate=Gate(), of_tokens=True, out_dtype=x.dtype, target=CPU)
        out = grouped_matmul(inner, layer.down, groups, target=CPU)
        x = joined(x, out, groups, weights)
    return x


def xla_step(x: jax.Array, routes: Any, layers: list[Layer]) -> jax.Array:
    """Return the same by XLA's own grouped products; weights are `[experts, in, out]`."""
    for layer, (groups, weights) in zip(layers, routes, strict=True):
        sizes = jnp.diff(groups.starts)
        sums = lax.ragged_dot(x[groups.tokens], layer.up, sizes, preferred_element_type=jnp.float32)
        inner = Gate().join(sums[:, :FFN], sums[:, FFN:]).astype(x.dtype)
        out = lax.ragged_dot(inner, layer.down, sizes, preferred_element_type=jnp.float32)
        x = joined(x, out, groups, weights)
    return x


def joined(x: jax.Array, out: jax.Array, groups: Groups, weights: jax.Array) -> jax.Array:
    """Add the outputs of each token's experts to the token, and keep its size."""
    summed = x + (out[groups.places] * weights[..., None]).sum(axis=1)
    return (summed * lax.rsqrt(jnp.square(summed).mean(axis=-1, keepdims=True))).astype(x.dtype)


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Compile a program with the compiler options of the engine."""
    options = {"xla_cpu_prefer_vector_width": 512} if "avx512f" in cpu_features() else {}
    program = jax.jit(function).lower(*arguments).compile(options)
    return lambda: jax.block_until_ready(program(*arguments))


def copy() -> Callable[[], None]:
    """Return a function that copies an array, with a thread on each core."""
    source, target = (np.full(_COPIED_BYTES, i, np.uint8) for i in range(2))
    threads = len(os.sched_getaffinity(0))
    parts = np.array_split(source, threads), np.array_split(target, threads)
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        list(pool.map(np.copyto, parts[1], parts[0]))

    return run


if __name__ == "__main__":
    main()
