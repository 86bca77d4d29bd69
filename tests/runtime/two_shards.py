"""Run by test_shards.py where jax sees two CPU devices: the same step on one and on two, printed as they differ."""

from __future__ import annotations

import jax
import msgspec
import numpy as np

from jaxserve.models.registry import family
from jaxserve.runtime.batch import ProgramKey, build, step_shape
from jaxserve.runtime.host_pool import HostPool
from jaxserve.runtime.mesh import make_mesh, shardings
from jaxserve.runtime.page_copies import PAGES_A_COPY, row_specs
from jaxserve.runtime.programs import READ_KEY, UPDATE_KEY, WRITE_KEY, ProgramBuilder
from jaxserve.runtime.state import make_state
from jaxserve.runtime.step import StepContext
from jaxserve.runtime.update import pack_open
from jaxserve.step_plan import StepPlan
from jaxserve.weights.dummy import dummy_params
from pallas_kernels.paged_attention import REFERENCE
from tests.runtime.tiny import CAPACITY, F32, model, opening, prefill, specs

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 4.0, "logit_bias": {200: 1.0, 3: -2.0}},
    {"seed": 3, "top_k": 50, "top_p": 0.95, "logprobs": 5},
    {"seed": 4, "min_p": 0.01, "presence_penalty": 1.0},
]


def run(tensor: int) -> list[np.ndarray]:
    """One mixed step of four prompts with prompt log probabilities; everything it leaves behind, and the pages of two
    of them once more, through host memory."""
    capacity = msgspec.structs.replace(CAPACITY, prompt_logprob_tokens=16)
    mesh = make_mesh(jax.devices(), tensor=tensor)
    abstract, state_specs = family(model()).abstract(model(), F32), specs(capacity)
    builder = ProgramBuilder(StepContext(model(), REFERENCE, 2), capacity, mesh, abstract, state_specs)
    params = dummy_params(abstract, shardings(mesh, abstract), 0)
    state = make_state(state_specs, shardings(mesh, state_specs))
    update = builder.compile(UPDATE_KEY)
    prompts = [[7, 250, 130], [9, 9], [11, 128, 129, 255], [1, 2, 3]]
    for slot, (prompt, options) in enumerate(zip(prompts, SAMPLING)):
        for vector in pack_open(opening(slot, prompt, **options)):
            state = update(state, vector[None])
    chunks = [prefill(slot, 0, prompt, (slot,), logits=len(prompt)) for slot, prompt in enumerate(prompts)]
    plan = StepPlan(opens=[], chunks=chunks, closes=[], num_decodes=0, greedy=False)
    key = ProgramKey("prompt_logprobs", 16, False)
    packed = build(plan, step_shape(key, capacity), capacity)
    state, output = builder.compile(key)(params, state, packed)
    pages = np.full((2, 1, PAGES_A_COPY), -1, np.int32)
    pages[:, 0, :2] = [0, 2], [9, 7]
    host = HostPool(row_specs(state_specs), 2)
    state, rows = builder.compile(READ_KEY)(state, pages[0])
    host.take([[1, 0]], rows)
    state = builder.compile(WRITE_KEY)(state, pages[1], host.give([[1, 0]]))
    keys = np.asarray(state.kv.keys)
    np.testing.assert_array_equal(keys[:, :, [9, 7]], keys[:, :, [0, 2]])
    tokens = sum(map(len, prompts))
    prompt_logprobs = jax.tree.map(lambda x: x[:, :tokens], output.prompt_logprobs)
    return [np.asarray(x) for x in jax.tree.leaves((state, output.tokens, output.logprobs, prompt_logprobs))]


if __name__ == "__main__":
    assert len(jax.devices()) == 2, jax.devices()
    for one, two in zip(run(1), run(2), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=1e-5)
    print("equal")
