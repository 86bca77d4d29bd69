"""The program that calculates scales, against the pool that a step fills with the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.models.registry import abstract_params
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.step import kv_scales
from jaxserve.runtime.step.batch import pack_step, step_shape
from jaxserve.runtime.step.kv_scales import KV_SCALES_KEY, pack_prompts
from jaxserve.runtime.step.program import ProgramKey, StepContext
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY
from jaxserve.runtime.step.state import DeviceState, make_state, state_specs
from jaxserve.step_plan import StepPlan
from pallas_kernels.paged_attention import REFERENCE
from tests.runtime.tiny import (
    CAPACITY,
    F32,
    builder,
    laid_out,
    mesh,
    on_trees,
    open_slots,
    opening,
    params,
    prefill,
    zero_state,
)

TOKENS = [7, 250, 130, 9, 11, 128, 129, 255, 1, 2, 3]


@pytest.fixture(scope="module")
def specs() -> DeviceState:
    fp8 = np.dtype(jnp.float8_e4m3fn)
    return state_specs(laid_out(), CAPACITY, kv_dtype=fp8)


@pytest.fixture(scope="module")
def program(specs: DeviceState) -> Any:
    abstract = abstract_params(laid_out(), F32)
    return on_trees(
        ProgramBuilder(StepContext(laid_out(), REFERENCE, 2), CAPACITY, mesh(), abstract, specs).compile(KV_SCALES_KEY)
    )


@pytest.mark.slow  # compiles five programs
def test_scales_are_the_largest_keys_and_values_of_each_layer(program: Any, specs: DeviceState) -> None:
    state, output = program(params(), make_state(specs, shardings(mesh(), specs)), pack_prompts(TOKENS, CAPACITY))
    assert output == ()
    largest = [np.abs(array).reshape(2, 2, -1).max(axis=(0, 2)) for array in _filled_pool()]
    expected = np.stack([largest[0] / 200, largest[1] / 100])
    found = np.asarray(state.kv[0].scales)
    assert found.shape == (1, 2, 2, 2)
    np.testing.assert_allclose(found[0], np.broadcast_to(expected[:, :, None], (2, 2, 2)), rtol=1e-5)
    assert not np.asarray(state.kv[0].keys).view(np.uint8).any(), "no page of the cache is written"


def _filled_pool() -> list[np.ndarray]:
    """Return the keys and values of a pool in float32 after a step over the tokens."""
    plain, key = builder(), ProgramKey("mixed", 16, False)
    programs = {name: plain.compile(name) for name in (UPDATE_KEY, ADJUST_KEY, key)}
    state = open_slots(programs, zero_state(CAPACITY), opening(0, TOKENS))
    plan = StepPlan(opens=[], chunks=[prefill(0, 0, TOKENS, (5, 0, 3))], num_decodes=0, greedy=False)
    state, _ = on_trees(programs[key])(params(), state, pack_step(plan, step_shape(key, CAPACITY), CAPACITY))
    return [np.asarray(array) for array in (state.kv[0].keys, state.kv[0].values)]


def test_without_tokens_the_scales_stay(program: Any, specs: DeviceState) -> None:
    given = np.arange(1.0, 9.0, dtype=np.float32).reshape(2, 2, 2)
    state = make_state(specs, shardings(mesh(), specs), [given])
    state, _ = program(params(), state, pack_prompts((), CAPACITY))
    np.testing.assert_array_equal(np.asarray(state.kv[0].scales)[0], given)


def test_no_more_tokens_count_than_the_program_takes() -> None:
    size = kv_scales.num_tokens(CAPACITY)
    assert size == 16, "the largest step"
    assert kv_scales.num_tokens(msgspec.structs.replace(CAPACITY, max_model_len=5)) == 5
    packed = pack_prompts(list(range(100)), CAPACITY)
    assert packed.tolist() == [[16, *range(16)]]


def test_pools_without_fp8_have_no_scales() -> None:
    plain = state_specs(laid_out(), CAPACITY, kv_dtype=F32)
    assert make_state(plain, shardings(mesh(), plain)).kv[0].scales is None


def test_a_scale_that_could_not_hold_other_numbers_is_not_taken(specs: DeviceState) -> None:
    """Of a layer whose first keys are 0, near 0, NaN or infinite."""
    pool = make_state(specs, shardings(mesh(), specs)).kv[0]
    changed = jax.jit(
        lambda largest: kv_scales._with_scales(dataclasses.replace(pool, scales=jnp.ones((2, 6, 2))), largest)
    )
    largest = np.array([[0, 1e-40, 1e-14, np.nan, np.inf, 200.0]] * 2, np.float32)
    found = np.asarray(changed(largest).scales)
    np.testing.assert_allclose(found[:, :, 0], [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 2]])
