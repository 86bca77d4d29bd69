"""The cost of starting a program: the host time of a call, and the effect of command buffers."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_sections.models import config_of
from device_sections.run import SectionRun
from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.device import facts_of_device
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.runtime.programs.builder import ProgramBuilder, leaves_of
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.step.batch import step_packing, step_shape
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.state import make_state


def dispatch(run: SectionRun) -> None:
    """Measure a decode program of Llama-3.2-1B with 8 empty rows: the time of the call and of the step."""
    config = EngineConfig(max_running_requests=8, cuda_graph_bs=(8,), max_total_tokens=512 if run.tiny else 2**15)
    made = deploy(config, parse_model_config(config_of("Llama-3.2-1B", run.tiny)), facts_of_device(run.device))
    builder = made.builder(make_mesh([run.device]))
    variants: dict[str, dict[str, Any] | None] = {"as it is": None}
    if run.device.platform in ("gpu", "cuda"):
        variants["without command buffers"] = {"xla_gpu_enable_command_buffer": ""}
    for name, options in variants.items():
        called, took = _measure(made, builder, options, calls=3 if run.tiny else 200)
        run.row(f"dispatch, {name}", called * 1e6, "us")
        run.row(f"empty step, {name}", took * 1e3, "ms")


def _measure(
    made: Deployment, builder: ProgramBuilder, options: dict[str, Any] | None, *, calls: int
) -> tuple[float, float]:
    key = ProgramKey("decode", 8, True)
    program = builder.lower(key).compile(options)
    where = shardings(builder.mesh, made.params)
    params = leaves_of(jax.tree.map(lambda s, at: jnp.zeros(s.shape, s.dtype, device=at), made.params, where))
    state = leaves_of(make_state(made.state, shardings(builder.mesh, made.state)))
    packed = np.zeros((1, step_packing(step_shape(key, made.capacity)).size), np.int32)
    state, output = program(params, state, packed)
    jax.block_until_ready(output)
    called, start = 0.0, time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        state, output = program(params, state, packed)
        called += time.perf_counter() - before
    jax.block_until_ready(output)
    return called / calls, (time.perf_counter() - start) / calls
