"""Checks what meshes of four CPU devices compute; test_shards.py runs named checks in a subprocess."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import PartitionSpec

from jaxserve.config.schema import EngineConfig
from jaxserve.layers.axes import TENSOR_AXES
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.runtime.execution.host_pool import HostPool
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.hlo import instructions
from jaxserve.runtime.sizing.deployment import deploy
from jaxserve.runtime.step.batch import pack_step, step_shape
from jaxserve.runtime.step.kv_scales import KV_SCALES_KEY, pack_prompts
from jaxserve.runtime.step.page_copies import PAGES_PER_COPY, read_key, row_specs, write_key
from jaxserve.runtime.step.program import ProgramKey, StepContext
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY
from jaxserve.runtime.step.state import make_state, state_specs
from jaxserve.step_plan import StepPlan, WindowGroup
from jaxserve.weights.dummy import dummy_params
from pallas_kernels.paged_attention import REFERENCE, KernelTarget
from pallas_kernels.sampling.parameters import IntColumn
from tests.runtime.step.test_sampling import VOCAB, _rows, sample_all, sample_all_by_triton
from tests.runtime.tiny import CAPACITY, F32, laid_out, on_trees, open_slots, opening, prefill, specs

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 4.0, "logit_bias": {200: 1.0, 3: -2.0}},
    {"seed": 3, "top_k": 50, "top_p": 0.95, "logprobs": 5},
    {"seed": 4, "min_p": 0.01, "presence_penalty": 1.0},
]


def run(tensor: int) -> list[np.ndarray]:
    """Run a mixed step of four prompts with prompt log probabilities, and copy the pages of two through host memory.

    Return all arrays of the results and the state.
    """
    capacity = msgspec.structs.replace(CAPACITY, prompt_logprob_tokens=16)
    mesh = make_mesh(jax.devices(), tensor=tensor)
    abstract, own_specs = abstract_params(laid_out(), F32), specs(capacity)
    builder = ProgramBuilder(StepContext(laid_out(), REFERENCE, 2), capacity, mesh, abstract, own_specs)
    params = dummy_params(abstract, shardings(mesh, abstract), 0)
    state = make_state(own_specs, shardings(mesh, own_specs))
    prompts = [[7, 250, 130], [9, 9], [11, 128, 129, 255], [1, 2, 3]]
    opens = [opening(slot, prompt, **options) for slot, (prompt, options) in enumerate(zip(prompts, SAMPLING))]
    state = open_slots({key: builder.compile(key) for key in (UPDATE_KEY, ADJUST_KEY)}, state, *opens)
    chunks = [prefill(slot, 0, prompt, (slot,), logits=len(prompt)) for slot, prompt in enumerate(prompts)]
    plan = StepPlan(opens=[], chunks=chunks, num_decodes=0, greedy=False)
    key = ProgramKey("prompt_logprobs", 16, False)
    packed = pack_step(plan, step_shape(key, capacity), capacity)
    state, output = on_trees(builder.compile(key))(params, state, packed)
    pages = np.full((2, 1, PAGES_PER_COPY), -1, np.int32)
    pages[:, 0, :2] = [0, 2], [9, 7]
    host = HostPool(row_specs(own_specs, 0), 2)
    state, rows = on_trees(builder.compile(read_key(0)))((), state, pages[0])
    host.store([[1, 0]], rows)
    state, _ = on_trees(builder.compile(write_key(0)))((), state, pages[1], *host.fetch([[1, 0]]))
    keys = np.asarray(state.kv[0].keys)
    np.testing.assert_array_equal(keys[:, :, [9, 7]], keys[:, :, [0, 2]])
    tokens = sum(map(len, prompts))
    prompt_logprobs = jax.tree.map(lambda x: x[:, :tokens], output.prompt_logprobs)
    return [np.asarray(x) for x in jax.tree.leaves((state, output.tokens, output.logprobs, prompt_logprobs))]


def step() -> None:
    """Two shards compute the same results and state as one."""
    for one, two in zip(run(1), run(2), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=1e-5)


def calculated_scales(data: int, tensor: int) -> np.ndarray:
    """Return the scales `[ranks, 2, layers, kv_heads]` that a mesh calculates from a few tokens."""
    model = laid_out(shards=tensor)
    capacity = msgspec.structs.replace(CAPACITY, num_ranks=data)
    mesh, abstract = make_mesh(jax.devices(), data=data, tensor=tensor), abstract_params(model, F32)
    fp8 = np.dtype(jax.numpy.float8_e4m3fn)
    fp8_specs = state_specs(model, capacity, kv_dtype=fp8)
    builder = ProgramBuilder(StepContext(model, REFERENCE, 2), capacity, mesh, abstract, fp8_specs)
    params = dummy_params(abstract, shardings(mesh, abstract), 0)
    state = make_state(fp8_specs, shardings(mesh, fp8_specs))
    tokens = pack_prompts([7, 250, 130, 9, 9], capacity)
    state, _ = on_trees(builder.compile(KV_SCALES_KEY))(params, state, tokens)
    return np.asarray(state.kv[0].scales)


def kv_scales() -> None:
    """All shards of all ranks calculate the same scales as one device, also where KV heads are repeated."""
    [alone] = calculated_scales(1, 1)
    assert (alone < 0.1).all()
    for data, tensor in ((2, 2), (1, 4)):
        for rank in calculated_scales(data, tensor):
            assert rank.shape == (2, 2, max(tensor, 2))
            np.testing.assert_allclose(rank[:, :, :1], alone[:, :, :1], rtol=1e-5)
            np.testing.assert_array_equal(rank, np.broadcast_to(rank[:, :, :1], rank.shape))


def empty_group() -> None:
    """A program returns the state as divided as it takes it, also if no layer keeps whole sequences."""
    model = LaidOutModel(dataclasses.replace(laid_out().config, windows=(8, 8)), shards=2)
    assert [spec.num_layers for spec in model.kv_specs()] == [0, 2]
    capacity = msgspec.structs.replace(CAPACITY, num_ranks=2, window_groups=(WindowGroup(10, 8),))
    mesh, abstract = make_mesh(jax.devices(), data=2, tensor=2), abstract_params(model, F32)
    own_specs = state_specs(model, capacity, kv_dtype=F32)
    builder = ProgramBuilder(StepContext(model, REFERENCE, 2), capacity, mesh, abstract, own_specs)
    for key in (UPDATE_KEY, write_key(0)):
        compiled = builder.compile(key)
        _, state, *_ = compiled.input_shardings[0]
        for taken, returned, array in zip(state, compiled.output_shardings[0], jax.tree.leaves(own_specs), strict=True):
            assert taken.is_equivalent_to(returned, len(array.shape)), array


DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {VOCAB - 1: 50.0}},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7, "temperature": 2.0},
    {"top_p": 0.3},
    {"top_p": 1e-9, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    {"min_p": 0.2, "temperature": 1.5},
    {"repetition_penalty": 1.8, "frequency_penalty": 0.5, "presence_penalty": 0.7},
    {"min_tokens": 10, "stop_ids": (3, 150, 151, 599), "top_k": 3},
]


def sampler() -> None:
    """Four shards draw the same tokens with the same log probabilities as one, also among equals."""
    rng = np.random.default_rng(0)
    for batch in range(20):
        logits = rng.normal(0.0, 2.0, (len(DRAWN), VOCAB)).astype(np.float32)
        if batch % 2:
            logits = np.round(logits)  # many are equal, over shards too
        opened = [
            opening(i, rng.integers(0, VOCAB, 5).tolist(), rng.integers(0, VOCAB, 5).tolist(), seed=batch, **options)
            for i, options in enumerate(DRAWN)
        ]
        for row, one in enumerate(opened):
            if one.sampling.temperature and batch % 3 == 0:
                logits[row, rng.integers(VOCAB)] = 40.0  # one shard has all the weight
        rows, counts, lengths = _rows(opened)
        rows.ints[:, IntColumn.LOGPROBS] = 1
        bits = rng.random((len(DRAWN), VOCAB)) < (1.0 if batch % 4 else 0.2)
        bits[:, batch] = True
        allowed = np.packbits(bits, axis=1, bitorder="little")
        allowed = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 4))).view(np.int32)
        given = (logits, rows, counts, lengths, allowed)
        alone = _on(1, sample_all)(*given)
        for together in (_on(4, sample_all)(*given), _on(4, sample_all_by_triton)(*given)):
            np.testing.assert_array_equal(alone[0], together[0])
            np.testing.assert_array_equal(alone[1].top_ids, together[1].top_ids)
            for name in ("chosen", "top"):
                np.testing.assert_allclose(getattr(alone[1], name), getattr(together[1], name), atol=1e-5, rtol=1e-5)


@functools.cache
def _on(count: int, sample: Callable[..., Any]) -> Callable[..., Any]:
    split, whole = PartitionSpec(None, TENSOR_AXES), PartitionSpec()
    mesh = make_mesh(jax.devices(), tensor=count)
    specs = (split, whole, split, whole, whole)
    return jax.jit(jax.shard_map(sample, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False))


def collectives() -> None:
    """A decode step exchanges only what the mathematics needs, within a rank: the logits once, and only to draw."""
    device = DeviceFacts(KernelTarget("cpu"), 2**34, max_devices=4)
    settings = EngineConfig(dtype="float32", dp_size=2, tp_size=2, max_running_requests=4, max_total_tokens=64)
    made = deploy(settings, laid_out().config, device)
    builder = made.builder(make_mesh(jax.devices(), data=2, tensor=2))
    layers = made.model.config.num_layers
    greedy, full = (_collectives(builder, ProgramKey("decode", 4, greedy)) for greedy in (True, False))
    # One after attention and one after the MLP of each layer, one after the embedding, two for the likeliest token.
    assert [opcode for opcode, _ in greedy] == ["all-reduce"] * (2 * layers + 3), greedy
    shard = 4 * made.model.config.vocab_size // 2
    [logits] = [elements for opcode, elements in full if opcode == "all-to-all"]
    assert logits <= shard, full
    # The largest other exchange of a row is that of the 20 likeliest tokens of each shard.
    assert max(elements for opcode, elements in full if opcode == "all-gather") <= 4 * 20 * 2, full
    assert max(elements for opcode, elements in full if opcode == "all-reduce") < shard, full


def _collectives(builder: ProgramBuilder, key: ProgramKey) -> list[tuple[str, int]]:
    found = instructions(builder.compile(key).as_text())
    return [(one.opcode, one.elements) for one in found if one.opcode.startswith(("all-", "reduce-scatter", "coll"))]


if __name__ == "__main__":
    assert len(jax.devices()) == 4, jax.devices()
    checks = {check.__name__: check for check in (step, sampler, collectives, kv_scales, empty_group)}
    for name in sys.argv[1:]:
        checks[name]()
    print("as it should be")
