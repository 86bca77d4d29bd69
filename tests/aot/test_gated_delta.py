"""Gated delta nets compile for devices that aren't here: no spills, states updated in place, few launches.

The sizes are those of Qwen3.5-35B-A3B, and of Qwen3.5-397B-A17B over eight devices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.devices.topology import target_mesh
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.programs.inspection import own_kernels_of
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.gated_delta import DeltaLayout, DeltaRows, DeltaStates, DeltaWeights, gated_delta
from pallas_kernels.target import target_of
from tests.aot.conftest import Row
from tests.aot.kernels import checked_kernels
from tests.aot.test_triton import REFUSE_SPILLS
from tests.selection import grid

pytestmark = pytest.mark.aot

BF16 = np.dtype(jnp.bfloat16)
ROWS, TOKENS = 64, 2048
A3B = DeltaLayout(30, 16, 32, 128, 128, 4, BF16)
LAYOUTS = {"35b": A3B, "397b-tp8": DeltaLayout(45, 2, 8, 128, 128, 4, BF16)}
# How many rows the pool has, and slots: on a GPU, the states of all layers take more than 32 bits can address.
STATES, SLOTS = {"triton": 320, "mosaic_tpu": 96}, {"triton": 256, "mosaic_tpu": 80}
FORMS: dict[str, dict[str, Any]] = {
    "decode": {"decode_only": True},
    "few-queries": {"max_queries": 5},
    "chunks": {},
}


def compile_layers(
    mesh: Mesh, name: BackendName, layout: DeltaLayout, form: str, layers: int = 1, options: Any = None
) -> Any:
    """Return the compiled gated delta nets of the first layers; the states are donated."""
    static = FORMS[form]
    if "max_queries" in static:
        layout = dataclasses.replace(layout, max_drafts=static["max_queries"] - 1)
    backend = Backend(name, target_of(mesh.devices.flat[0]))
    tokens = {"decode": ROWS, "few-queries": 5 * ROWS, "chunks": TOKENS}[form]

    def struct(shape: tuple[int, ...], dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def mix(states: DeltaStates, products: Any, gates: Any, weights: DeltaWeights, where: list[jax.Array]) -> Any:
        rows, outputs = DeltaRows(*where, **static), []
        for layer, new in enumerate(zip(products, gates, strict=True)):
            out, states = gated_delta(*new, weights, states, layer, rows, backend)
            outputs.append(out)
        return outputs, states

    recurrent, tails = layout.pool_shapes(STATES[name])
    *entries, inputs = (struct(x, np.float32) for x in layout.slot_shapes(SLOTS[name]))
    states = DeltaStates(
        struct(recurrent, np.float32), struct(tails, layout.dtype), *entries, struct(inputs.shape, layout.dtype)
    )
    heads = struct((layout.value_heads,), np.float32)
    weights = DeltaWeights(struct((layout.key_heads, layout.width, layout.taps), layout.dtype), heads, heads)
    products = [struct((tokens, layout.key_heads, layout.width), layout.dtype)] * layers
    gates = [struct((tokens, layout.key_heads, 2, layout.group), layout.dtype)] * layers
    where = [struct((ROWS,)), struct((ROWS + 1,)), *[struct((ROWS,))] * 7, struct(())]
    sharded = jax.shard_map(mix, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(sharded, donate_argnums=0).lower(states, products, gates, weights, where)
    return lowered.compile(options)


def held_bytes(layout: DeltaLayout, name: BackendName) -> int:
    """Return the bytes of all states."""
    return layout.state_bytes * STATES[name] + layout.slot_bytes * SLOTS[name]


GPUS = ("nvidia-h200", "nvidia-h100", "nvidia-a100-80", "nvidia-l4", "nvidia-b200")
ON_GPUS = grid(
    ((target, model, form) for target in GPUS for model in LAYOUTS for form in FORMS),
    lambda case: case[1] == "35b" and (case[0] == "nvidia-h200" or case[::2] == ("nvidia-l4", "chunks")),
)
KERNELS = {"decode": {"decode"}, "few-queries": {"decode"}, "chunks": {"convolution", "chunks"}}


@pytest.mark.parametrize(("target", "model", "form"), ON_GPUS)
def test_tritons_kernels_spill_nothing(target: str, model: str, form: str, report: Callable[[Row], None]) -> None:
    start = time.monotonic()
    compiled = compile_layers(target_mesh(target), "triton", LAYOUTS[model], form, options=REFUSE_SPILLS)
    memory, seconds = compiled.memory_analysis(), time.monotonic() - start
    kernels = checked_kernels(compiled, target)
    report(Row(target, model, form, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))
    assert {one.kernel for one in kernels} == {f"gated_delta_{name} (triton)" for name in KERNELS[form]}
    assert memory.alias_size_in_bytes >= held_bytes(LAYOUTS[model], "triton")
    # Beside outputs, chunks keep those of the convolution, and the keys of the rows' slots.
    assert memory.temp_size_in_bytes < (2**16 if form != "chunks" else 2**26)


@pytest.mark.parametrize(("form", "most"), [("decode", 1), ("few-queries", 1), ("chunks", 4)])
def test_launches_of_a_layer(form: str, most: int) -> None:
    """XLA gathers the keys and the decays of the rows' slots before chunks are computed."""

    def launches(layers: int) -> int:
        text = compile_layers(target_mesh("nvidia-h200"), "triton", A3B, form, layers).as_text()
        return sum(x.opcode in ("fusion", "custom-call", "copy") for x in instructions(text))

    assert launches(2) - launches(1) == most


ON_TPUS = grid(
    ((target, model, form) for target in ("tpu-v6e", "tpu-v5e") for model in LAYOUTS for form in ("decode", "chunks")),
    lambda case: case == ("tpu-v6e", "397b-tp8", "decode"),
)


@pytest.mark.parametrize(("target", "model", "form"), ON_TPUS)
def test_a_tpus_kernels_leave_states_in_place(
    target: str, model: str, form: str, report: Callable[[Row], None]
) -> None:
    start = time.monotonic()
    compiled = compile_layers(target_mesh(target), "mosaic_tpu", LAYOUTS[model], form)
    memory, seconds = compiled.memory_analysis(), time.monotonic() - start
    own = instructions(compiled.as_text())
    kernels, _ = own_kernels_of(compiled, own)
    report(Row(target, model, form, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes, kernels))
    name = "gated_delta_tpu" + ("_decode" if form == "decode" else "")
    assert {one.kernel for one in kernels} == {f"{x} (mosaic tpu)" for x in (name, "gated_delta_tpu_inputs")}
    assert memory.alias_size_in_bytes >= held_bytes(LAYOUTS[model], "mosaic_tpu")
    assert memory.temp_size_in_bytes < (2**23 if form == "decode" else 2**29)
    # The decays, which are small, are laid out anew.
    inputs = np.prod(LAYOUTS[model].slot_shapes(SLOTS["mosaic_tpu"])[-1])
    assert not [one for one in own if one.opcode in ("copy", "transpose") and one.elements >= inputs // 2]
