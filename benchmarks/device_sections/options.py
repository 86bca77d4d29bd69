"""Whole steps of Llama-3.1-8B under several sets of compile options, with live requests and the default KV pool.

The programs are compiled before weights and pool fill the device, as at the start of an engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from device_sections.models import config_of
from device_sections.prediction import step_seconds
from device_sections.run import SectionRun
from jaxserve.api_types import SamplingParams
from jaxserve.config.schema import EngineConfig
from jaxserve.models.registry import parse_model_config
from jaxserve.runtime.devices.attach import attach
from jaxserve.runtime.devices.device import facts_of_device
from jaxserve.runtime.devices.mesh import make_mesh, shardings
from jaxserve.runtime.execution.device_commands import LocalCommands
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.programs.autotune_cache import autotune_folder, autotune_options
from jaxserve.runtime.programs.builder import ProgramBuilder, compiler_options
from jaxserve.runtime.programs.cost import ProgramCost
from jaxserve.runtime.programs.inspection import attached_cost
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.slot_update import UPDATE_KEY
from jaxserve.runtime.step.state import make_state
from jaxserve.step_plan import Chunk, SlotOpen, StepPlan
from jaxserve.weights.dummy import dummy_params

MODEL = "Llama-3.1-8B"
# What each variant changes of the deployment's own options; None leaves an option to XLA.
_LOOPS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
_VARIANTS: Mapping[str, Mapping[str, str | None]] = {
    "as served": {},
    "with rematerialization": {"xla_disable_hlo_passes": None},
    "no graphs": {"xla_gpu_enable_command_buffer": ""},
    "loops in graphs": {"xla_gpu_enable_command_buffer": _LOOPS},
    "products by Triton too": {"xla_gpu_enable_triton_gemm": None},
}
# The share of the section's time after which no further variant is compiled.
_COMPILE_SHARE = 0.7


def steps(run: SectionRun) -> None:
    """Measure a decode step of 128 rows and a mixed one of 2048 tokens, both with the sampler, under each variant."""
    rows, chunk, context = (16, 32, 16) if run.tiny else (128, 2048, 1024)
    settings: dict[str, Any] = {"max_running_requests": rows, "cuda_graph_bs": (rows,), "chunked_prefill_size": chunk}
    config = EngineConfig(**settings, max_total_tokens=1024 if run.tiny else None)
    device = attach(config)[0]
    made = deploy(config, parse_model_config(config_of(MODEL, run.tiny)), facts_of_device(device))
    builder = made.builder(make_mesh([device]))
    keys = [ProgramKey("decode", rows, False), ProgramKey("mixed", chunk, False)]
    programs = _compile(run, builder, keys, device)
    update = builder.lower(UPDATE_KEY).compile()
    where = shardings(builder.mesh, made.params)
    params = jax.block_until_ready(dummy_params(made.params, where, 0))
    state = make_state(made.state, shardings(builder.mesh, made.state))
    chosen: dict[ProgramKey, Any] = {UPDATE_KEY: update}
    executor = DeviceExecutor(LocalCommands(params, state, chosen), made.capacity)
    for variant, key in programs:
        if run.left < 3:
            return
        chosen[key] = programs[variant, key]
        cost = attached_cost(builder, chosen[key])
        _measure(run, executor, made, key, f"{key}, {variant}", context, cost)


def _compile(
    run: SectionRun, builder: ProgramBuilder, keys: list[ProgramKey], device: Any
) -> dict[tuple[str, ProgramKey], jax.stages.Compiled]:
    """Compile the variants in order while there is time; XLA tunes each product only once."""
    own = compiler_options(builder.mesh, 1) | autotune_options(autotune_folder(device, run.cache))
    until = run.left * (1 - _COMPILE_SHARE)
    programs = {}
    for variant, changes in _VARIANTS.items():
        if changes and device.platform not in ("gpu", "cuda"):
            continue
        options = {name: value for name, value in {**own, **changes}.items() if value is not None}
        for key in keys:
            if run.left < until and programs:
                run.row(f"{key}, {variant}: not tried", 0, "", note="no time was left to compile it")
                continue
            start = time.perf_counter()
            try:
                program = builder.lower(key).compile(options)
            except Exception as error:  # the errors of compilers have no common base class
                run.row(f"{key}, {variant}: not built", 0, "", note=str(error).splitlines()[0][:200])
                continue
            memory: Any = program.memory_analysis()
            programs[variant, key] = program
            run.row(f"{key}, {variant}: compile", time.perf_counter() - start, "s",
                    note=f"{memory.temp_size_in_bytes / 2**20:.0f} MiB of temp")  # fmt: skip
    return programs


def _measure(
    run: SectionRun,
    executor: DeviceExecutor,
    made: Deployment,
    key: ProgramKey,
    name: str,
    context: int,
    cost: ProgramCost,
) -> None:
    """Measure steps back to back: in a mixed step half of the slots decode, and one of the others starts its prompt."""
    count = 4 if run.tiny else 40
    slots, page_size = made.capacity.num_slots, made.capacity.page_size
    decodes = slots if key.kind == "decode" else slots // 2
    prompt = 0 if key.kind == "decode" else key.size - decodes
    pages = -(-max(context + count + 2, prompt) // page_size)
    if pages * slots > made.capacity.num_pages:
        run.row(f"{name}: not run", 0, "", note=f"the pool has only {made.capacity.num_pages} pages")
        return
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
    tables = np.arange(slots * pages).reshape(slots, pages).tolist()

    def opened(slot: int, cached: int) -> SlotOpen:
        return SlotOpen(slot=slot, rank=0, sampling=sampling, stop_ids=(), sample=0, prompt_ids=[1] * (cached + 1),
                        output_ids=[], cached_pages=(tuple(tables[slot]),), num_cached_tokens=cached)  # fmt: skip

    part = functools.partial(Chunk, rank=0, new_pages=((),), logits=1, sample=True)

    def plan(step: int) -> StepPlan:
        chunks = [part(request_id=str(slot), slot=slot, start=context + step, length=1, tokens=None)
                  for slot in range(decodes)]  # fmt: skip
        opens = [opened(slot, context if slot < decodes else 0) for slot in range(slots)] if step == 0 else []
        if prompt:
            slot = decodes + step
            chunks.append(part(request_id=str(slot), slot=slot, start=0, length=prompt, tokens=[1] * prompt))
        return StepPlan(opens=opens, chunks=chunks, num_decodes=decodes, greedy=False)

    for step in range(2):  # the first run of a program builds its graph
        executor.collect(executor.dispatch(plan(step)))
    plans = [plan(step) for step in range(2, 2 + count)]
    start = time.perf_counter()
    running = [executor.dispatch(one) for one in plans]
    dispatched = time.perf_counter() - start
    for one in running:
        executor.collect(one)
    seconds = (time.perf_counter() - start) / count
    predicted = step_seconds(run, made, decodes=decodes, context=context, prompt=prompt, cost=cost)
    run.row(f"{name}: step", seconds * 1e3, "ms", predicted=None if predicted is None else predicted * 1e3,
            note=f"{decodes} x {context} decoding, {prompt} tokens of a prompt; "
                 f"{dispatched / count * 1e6:,.0f} us to dispatch")  # fmt: skip
