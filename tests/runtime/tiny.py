"""A tiny deployment: two layers, a few slots, programs that compile in a second."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.api_types import SamplingParams
from jaxserve.models.config import ModelConfig
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.runtime.programs.builder import ProgramBuilder, leaves_of
from jaxserve.runtime.step.program import StepContext
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY, pack_adjustments, pack_updates
from jaxserve.runtime.step.state import DeviceState, make_state, state_specs
from jaxserve.step_plan import Capacity, Chunk, SlotOpen
from jaxserve.weights.dummy import dummy_params
from pallas_kernels.paged_attention import REFERENCE
from tests.tiny_model import CONFIG

F32 = np.dtype(np.float32)
CAPACITY = Capacity(
    num_slots=4,
    num_pages=20,
    page_size=4,
    max_model_len=24,
    decode_buckets=(2, 4),
    token_buckets=(8, 16),
    prompt_logprob_tokens=8,
)


def model() -> ModelConfig:
    return parse_model_config(CONFIG)


def laid_out(**layout: int) -> AnyModel:
    return LaidOutModel(model(), **layout)


@functools.cache
def mesh() -> Mesh:
    return make_mesh(jax.devices("cpu"))


def specs(capacity: Capacity, vocab_size: int = CONFIG["vocab_size"]) -> DeviceState:
    return state_specs(LaidOutModel(dataclasses.replace(model(), vocab_size=vocab_size)), capacity, kv_dtype=F32)


def zero_state(capacity: Capacity, vocab_size: int = CONFIG["vocab_size"]) -> DeviceState:
    state = specs(capacity, vocab_size)
    return make_state(state, shardings(mesh(), state))


def builder(capacity: Capacity = CAPACITY, *, sample_rows: int | None = 16) -> ProgramBuilder:
    context = StepContext(laid_out(), REFERENCE, sample_rows)
    return ProgramBuilder(context, capacity, mesh(), abstract_params(laid_out(), F32), specs(capacity))


@functools.cache
def params() -> Any:
    abstract = abstract_params(laid_out(), F32)
    return dummy_params(abstract, shardings(mesh(), abstract), 0)


def on_trees(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled program as a function `(weights, state, packed, *rows) -> (state, output)` of trees.

    Weights are () for a program that takes none.
    """

    def call(params: Any, state: DeviceState, *more: Any) -> tuple[DeviceState, Any]:
        leaves, output = program(leaves_of(params), leaves_of(state), *more)
        return jax.tree.structure(state).unflatten(leaves), output

    return call


def open_slots(
    programs: Mapping[Any, Callable[..., Any]], state: DeviceState, *opens: SlotOpen, capacity: Capacity = CAPACITY
) -> DeviceState:
    """Open slots of one rank by compiled programs."""
    for key, vectors in ((UPDATE_KEY, pack_updates(opens, capacity)), (ADJUST_KEY, pack_adjustments(opens))):
        for vector in vectors:
            state, _ = on_trees(programs[key])((), state, vector[None])
    return state


def on_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function that names mesh axes, over a mesh of one device."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh(), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    )


def opening(
    slot: int = 0, prompt: list[int] | None = None, outputs: list[int] | None = None, **options: Any
) -> SlotOpen:
    """Return a `SlotOpen`; options that it has no field for become sampling parameters."""
    own = {name: options.pop(name) for name in list(options) if name in SlotOpen.__struct_fields__}
    fields: dict[str, Any] = {"rank": 0, "stop_ids": (), "sample": 0} | own
    sampling = SamplingParams(**{"seed": 0} | options)
    return SlotOpen(slot=slot, sampling=sampling, prompt_ids=prompt or [1], output_ids=outputs or [], **fields)


def decode(slot: int, start: int, pages: tuple[int, ...] = ()) -> Chunk:
    return Chunk(
        request_id=f"s{slot}",
        slot=slot,
        rank=0,
        start=start,
        length=1,
        tokens=None,
        new_pages=(pages,),
        logits=1,
        sample=True,
    )


def prefill(
    slot: int, start: int, tokens: list[int], pages: tuple[int, ...] = (), *, sample: bool = True, **options: Any
) -> Chunk:
    fields: dict[str, Any] = {"logits": int(sample)} | options
    return Chunk(
        request_id=f"s{slot}",
        slot=slot,
        rank=0,
        start=start,
        length=len(tokens),
        tokens=tokens,
        new_pages=(pages,),
        sample=sample,
        **fields,
    )
