"""The Mosaic GPU backend: Hopper GPUs, with their copy engine and warpgroup products, by Pallas' own GPU lowering.

Numbers of every scheme are multiplied by bfloat16; int8 and fp8 also by inputs that are quantized. Inputs of 16 or 32
bits that aren't bfloat16 are split into terms of bfloat16, each a row of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul.layout import QuantizedWeight
from pallas_kernels.quantized_matmul.mosaic_gpu.kernel import MosaicGpuMatmul
from pallas_kernels.quantized_matmul.mosaic_gpu.plan import BLOCK, ProductPlan, make_plan, rule_sizes
from pallas_kernels.quantized_matmul.mosaic_gpu.unpack import TILE_ROWS, Unpacking
from pallas_kernels.quantized_matmul.scheme import Scheme
from pallas_kernels.quantized_matmul.terms import TERMS, bfloat16_terms
from pallas_kernels.quantized_matmul.tuning import tuned_blocks
from pallas_kernels.target import KernelTarget
from pallas_kernels.tuning import Kind

_CORES = 132
# The interpreter runs programs one after another: just enough of them that some tiles are divided.
_INTERPRETED_CORES = 5

_SMALL_GROUPS = (32, 64)


def refusal(out_dim: int, in_dim: int, scheme: Scheme, target: KernelTarget) -> str | None:
    """Return what isn't supported (scheme or size), or None."""
    if scheme.activations is not None and (scheme.bits == 4 or scheme.zeros):
        return "mosaic_gpu multiplies quantized inputs by int8 and fp8 without zeros"
    groups = "" if scheme.activations else "32, 64 or "
    if scheme.group is not None and scheme.group % BLOCK and not (groups and scheme.group in _SMALL_GROUPS):
        return f"mosaic_gpu takes groups of {groups}multiples of {BLOCK} inputs here, not of {scheme.group}"
    if out_dim % TILE_ROWS or in_dim % BLOCK:
        return f"mosaic_gpu takes multiples of {TILE_ROWS} outputs and {BLOCK} inputs, not {out_dim} and {in_dim}"
    return None


def arrangement(in_dim: int, scheme: Scheme, target: KernelTarget) -> tuple[int, ...]:
    """See `QuantizedWeight`."""
    return () if scheme.activations else unpacking_of(in_dim, scheme).arrangement


def multiply(
    x: Shaped[Array, "tokens in_dim"],
    factors: Float32[Array, "tokens groups"] | None,
    weight: QuantizedWeight,
    *,
    out_dtype: Any,
    backend: Backend,
) -> Float[Array, "tokens out_dim"]:
    """See `backends.ProductModule`."""
    target, interpret = backend.target, backend.interpret
    scheme, (tokens, in_dim) = weight.scheme, x.shape
    assert weight.arrangement == arrangement(in_dim, scheme, target), weight.arrangement
    out_dim, group = weight.scale.size // weight.scale.shape[-1], scheme.group or in_dim
    numbers, scale = weight.numbers.reshape(out_dim, -1), weight.scale.reshape(out_dim, -1)
    zero = None if weight.zero is None else weight.zero.reshape(out_dim, -1)
    terms = 1
    if factors is None:
        terms = TERMS[jnp.dtype(x.dtype)]
        x = bfloat16_terms(x, terms)
        numbers = lax.bitcast_convert_type(numbers.reshape(out_dim, -1, 4), jnp.uint32)
    cores = _INTERPRETED_CORES if interpret else target.cores or _CORES
    chosen = tuned_blocks(target, "mosaic_gpu", tokens, out_dim, in_dim, scheme) or {}
    plan = make_plan(out_dim, in_dim, len(x), cores, scheme, rule_sizes(out_dim, len(x), scheme) | chosen)
    x = jnp.pad(x, ((0, plan.token_tiles * plan.tokens - len(x)), (0, 0)))
    unpacking = None
    if factors is not None:
        # The kernel takes a factor for each block; a group may have several blocks.
        factors = jnp.repeat(factors, in_dim // BLOCK // factors.shape[1], axis=1).T
        factors = jnp.pad(factors, ((0, 0), (0, len(x) - tokens)))
    else:
        unpacking = unpacking_of(in_dim, scheme)
        if zero is not None and zero.dtype != jnp.int16:
            factors = x.astype(jnp.float32).reshape(len(x), -1, unpacking.group).sum(axis=-1).T
    rounds = plan.parts == terms == 1 and out_dtype == jnp.bfloat16
    kernel = MosaicGpuMatmul(plan, group, unpacking, interpret)
    out = kernel.multiply(x, factors, numbers, scale, zero, jnp.bfloat16 if rounds else jnp.float32)
    out = _sum_parts(out, plan)
    return out[: terms * tokens].reshape(terms, tokens, out_dim).sum(axis=0)


def unpacking_of(in_dim: int, scheme: Scheme) -> Unpacking:
    """Return how the numbers of a weight-only scheme are read."""
    return Unpacking(scheme.numbers, min(scheme.group or in_dim, BLOCK))


def candidates(kind: Kind) -> list[dict[str, int]]:
    """Return the block sizes to time for the tuned table. Tuning skips sizes that don't compile.

    The rule chooses the other sizes, as the number of tokens of a decode varies.
    """
    if kind == "decode":
        sizes = itertools.product((1, 2, 4), (1, 2), (4, 8))
        return [{"warpgroups": n, "cluster": cluster, "stages": stages} for n, cluster, stages in sizes]
    tiles = itertools.product((64, 96, 128), (2, 4), (1, 2))
    return [{"tokens": tokens, "warpgroups": n, "cluster": cluster} for tokens, n, cluster in tiles]


def _sum_parts(out: Float[Array, "parts tokens out_dim"], plan: ProductPlan) -> Float[Array, "tokens out_dim"]:
    """Add the parts of each tile; entries without a part were never written."""
    if plan.parts == 1:
        return out[0]
    exists = np.arange(plan.parts)[:, None] < plan.part_counts
    exists = exists.reshape(plan.parts, plan.output_tiles, plan.token_tiles).swapaxes(1, 2)
    mask = jnp.repeat(jnp.repeat(exists, plan.outputs, axis=2), plan.tokens, axis=1)
    return jnp.where(mask, out, 0.0).sum(axis=0)
