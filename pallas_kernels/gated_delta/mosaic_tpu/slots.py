"""Writes the last inputs of the convolution into the slots, in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

# With so many inputs, tiles of memory have fewer rows than those that XLA scatters, so it would copy the whole array.
# With others, it is laid out in a way that a kernel can't take.
_OF_A_KERNEL = (2, 4)


def write_slots(
    slots_inputs: Float[Array, "slots key_heads recent width"],
    found: Float[Array, "rows key_heads recent width"],
    slots: Int[Array, " rows"],
    count: Int[Array, ""],
    *,
    interpret: bool,
) -> Float[Array, "slots key_heads recent width"]:
    """Return the inputs by slot, those of the first `count` rows replaced by what was `found`."""
    if found.shape[2] not in _OF_A_KERNEL:
        at = jnp.where(jnp.arange(len(slots)) < count, slots, len(slots_inputs))
        return slots_inputs.at[at].set(found, mode="drop")
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        _write,
        out_shape=jax.ShapeDtypeStruct(slots_inputs.shape, slots_inputs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={2: 0},
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="gated_delta_tpu_inputs",
    )(slots, found, slots_inputs)


def _write(slots: Any, found: Any, _: Any, slots_inputs: Any, done: Any) -> None:
    row = pl.program_id(0)
    copy = pltpu.make_async_copy(found.at[row], slots_inputs.at[slots[row]], done)
    copy.start()
    copy.wait()
