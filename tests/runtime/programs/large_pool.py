"""Programs of a deployment whose pool is far larger than a step's working memory, so that a copy of it shows."""

from __future__ import annotations

from typing import Any

from jaxserve.runtime.programs.table import step_keys
from jaxserve.runtime.step.batch import pack_step, step_shape
from jaxserve.runtime.step.page_copies import read_key, write_key
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import ADJUST_KEY, UPDATE_KEY
from jaxserve.runtime.step.state import DeviceState
from jaxserve.step_plan import Capacity, StepPlan
from tests.runtime.tiny import on_trees, open_slots, opening, params, prefill, zero_state

CAPACITY = Capacity(
    num_slots=4,
    num_pages=4096,
    page_size=16,
    max_model_len=64,
    decode_buckets=(4,),
    token_buckets=(16,),
    prompt_logprob_tokens=8,
)
STEPS = step_keys(CAPACITY)
KEYS: list[ProgramKey] = [UPDATE_KEY, ADJUST_KEY, read_key(0), write_key(0), *STEPS]


def first_step(programs: dict[ProgramKey, Any]) -> tuple[DeviceState, DeviceState, Any]:
    """Open a slot and prefill it. Return the state before and after the step, and the output."""
    state = zero_state(CAPACITY)
    state = open_slots(programs, state, opening(1, [5, 6, 7], temperature=0.8, logprobs=3, seed=4), capacity=CAPACITY)
    plan = StepPlan(opens=[], chunks=[prefill(1, 0, [5, 6, 7], (9,))], num_decodes=0, greedy=False)
    key = next(key for key in STEPS if key.kind == "mixed")
    after, output = on_trees(programs[key])(params(), state, pack_step(plan, step_shape(key, CAPACITY), CAPACITY))
    return state, after, output
