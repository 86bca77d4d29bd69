"""The TPU kernel: each entry of the work list is a tile of rows times a tile of the outputs of one expert.

Only weights of the experts in the list are copied to vector memory, each once. Several experts can share a tile of
rows: its result stays in vector memory while each of them writes its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.grouped_matmul.gate import Gate
from pallas_kernels.grouped_matmul.mosaic_tpu.work import ExpertWork
from pallas_kernels.quantized_matmul.mosaic_tpu.kernel import Ref, TileSizes, arrange, sum_products


@dataclasses.dataclass(frozen=True)
class GroupedOperands:
    """The operands that rows are multiplied by or that are added; `parts` are 2 with a gate, otherwise 1.

    - `numbers`: the weights or their stored numbers, `[experts, parts, outputs, stored]`.
    - `scale`, `zero`: the factors of each part of a quantized weight, `[experts, groups, outputs or more]`. The part
      begins at tile `first_tiles[part]` of the outputs.
    - `totals`: the sums of the inputs of each group, `[rows, groups]`, if there are zeros.
    - `bias`: `[experts, parts, outputs]`.
    """

    numbers: Shaped[Array, "experts parts outputs stored"]
    scale: Sequence[Float[Array, "experts groups _"]] = ()
    zero: Sequence[Shaped[Array, "experts groups _"]] = ()
    first_tiles: tuple[int, ...] = ()
    totals: Float32[Array, "rows groups"] | None = None
    bias: Float[Array, "experts parts outputs"] | None = None


def product(
    x: Float[Array, "rows in_dim"],
    operands: GroupedOperands,
    work: ExpertWork,
    tiles: TileSizes,
    gate: Gate | None,
    out_dtype: Any,
    *,
    vmem_limit: int,
    interpret: bool,
) -> Float[Array, "rows outputs"]:
    """Return the rows times the weights of their experts, with biases, joined by the gate."""
    _, parts, outputs, _ = operands.numbers.shape

    def of_rows(out: Array, i: Array, experts: Ref, row_tiles: Ref, *_: Ref) -> tuple[Any, ...]:
        return row_tiles[i], 0

    def of_outputs(out: Array, i: Array, experts: Ref, *_: Ref) -> tuple[Any, ...]:
        return experts[i], 0, out, 0

    def of_groups(first_tile: int, out: Array, i: Array, experts: Ref, *_: Ref) -> tuple[Any, ...]:
        return experts[i], 0, first_tile + out

    def of_bias(out: Array, i: Array, experts: Ref, *_: Ref) -> tuple[Any, ...]:
        return experts[i], 0, out

    def of_result(out: Array, i: Array, experts: Ref, row_tiles: Ref, *_: Ref) -> tuple[Any, ...]:
        return row_tiles[i], out

    by_rows = pl.BlockSpec((tiles.block_rows, x.shape[1]), of_rows)
    stored = (None, parts, tiles.block_out, operands.numbers.shape[-1])
    given: dict[str, tuple[Any, pl.BlockSpec]] = {
        "x": (x, by_rows),
        "numbers": (operands.numbers, pl.BlockSpec(stored, of_outputs)),
    }
    scratch = {"sums": pltpu.VMEM((parts, tiles.block_rows, tiles.block_out), jnp.float32)}
    if operands.scale:
        groups = operands.scale[0].shape[1]
        for name, factors in (("scale", operands.scale), ("zero", operands.zero)):
            for part, (array, first) in enumerate(zip(factors, operands.first_tiles)):
                index = functools.partial(of_groups, first)
                given[f"{name}{part}"] = array, pl.BlockSpec((None, groups, tiles.block_out), index)
        scratch["scales"] = pltpu.VMEM((groups, tiles.block_out), jnp.float32)
        if tiles.packed:
            scratch["arranged"] = pltpu.VMEM((tiles.block_rows, x.shape[1]), x.dtype)
        if operands.zero:
            given["totals"] = operands.totals, pl.BlockSpec((tiles.block_rows, groups), of_rows)
    if operands.bias is not None:
        given["bias"] = operands.bias, pl.BlockSpec((None, parts, tiles.block_out), of_bias)

    def kernel(experts: Ref, row_tiles: Ref, count: Ref, starts: Ref, *refs: Ref) -> None:
        named = dict(zip((*given, "out", *scratch), refs, strict=True))
        work = pl.program_id(1)

        @pl.when(work < count[0])
        def _() -> None:
            _multiply(named, work, row_tiles, tiles)
            out, sums = named["out"], [named["sums"][part] for part in range(parts)]
            if "bias" in named:
                sums = [total + named["bias"][part : part + 1].astype(jnp.float32) for part, total in enumerate(sums)]
            result = sums[0] if gate is None else gate.join(*sums)
            expert, first = experts[work], row_tiles[work] * tiles.block_rows
            rows = first + lax.broadcasted_iota(jnp.int32, result.shape, 0)
            own = (rows >= starts[expert]) & (rows < starts[expert + 1])
            out[...] = jnp.where(own, result, out[...].astype(jnp.float32)).astype(out.dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(outputs, tiles.block_out), len(work.experts)),
            in_specs=[spec for _, spec in given.values()],
            out_specs=pl.BlockSpec((tiles.block_rows, tiles.block_out), of_result),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), out_dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="grouped_matmul_tpu",
    )(work.experts, work.tiles, work.count, work.starts, *(operand for operand, _ in given.values()))


def _multiply(named: dict[str, Ref], work: Array, row_tiles: Ref, tiles: TileSizes) -> None:
    """Write the products of a tile of rows and each part of the weight into the sums."""
    x, numbers, sums = named["x"], named["numbers"], named["sums"]
    if "scales" not in named:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        for part in range(numbers.shape[0]):
            sums[part] = lax.dot_general(
                x[...],
                numbers[part],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
        return
    if tiles.packed:
        is_new = (work == 0) | (row_tiles[work] != row_tiles[jnp.maximum(work - 1, 0)])
        pl.when(is_new)(lambda: arrange(named["x"], named["arranged"]))
        x = named["arranged"]
    for part in range(numbers.shape[0]):
        offsets = [named[f"zero{part}"], named["totals"]] if "totals" in named else []
        sum_products(x, numbers.at[part], named[f"scale{part}"], offsets, named["scales"], sums.at[part], tiles)
