"""Builds an engine: the only module that imports both the scheduler (`engine/`) and the executor (`runtime/`).

`python -m jaxserve.worker` is the engine process; `build_engine` builds the same engine in the caller's process.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from jax.sharding import Mesh

from jaxserve.api_types import EngineInfo, KVGroup
from jaxserve.config.data_parallel import parallelism
from jaxserve.config.model_files import fetch_files
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import read_served_checkpoint
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.core.profiling import Profiling
from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.engine.process.main import run
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.encoder_scheduler import AnyScheduler, EncoderScheduler
from jaxserve.engine.scheduling.grammars import Grammars
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.speculation.speculation import Speculation
from jaxserve.error_texts import join_differences
from jaxserve.errors import ConfigError
from jaxserve.models.registry import parse_model_config
from jaxserve.observability.timeline import Timeline
from jaxserve.runtime.devices.attach import attach
from jaxserve.runtime.devices.device import facts_of_devices, free_bytes
from jaxserve.runtime.devices.distributed import devices_of_all, join_processes, resolve_local_devices
from jaxserve.runtime.devices.mesh import device_bytes, make_stage_meshes
from jaxserve.runtime.execution.deployment_log import (
    log_drafting,
    log_kv_groups,
    log_kv_scales,
    log_pooling,
    log_sizes,
    log_states,
    log_weights,
)
from jaxserve.runtime.execution.device_commands import (
    BroadcastCommands,
    DeviceCommands,
    FollowerExecutor,
    LocalCommands,
)
from jaxserve.runtime.execution.executor import DeviceExecutor
from jaxserve.runtime.execution.expert_tokens import ExpertTokens
from jaxserve.runtime.execution.host_memory import HostMemory, plan_host_memory
from jaxserve.runtime.execution.profiler import JaxProfiler
from jaxserve.runtime.execution.staged_commands import StagedCommands
from jaxserve.runtime.execution.stages import connect_stages
from jaxserve.runtime.execution.startup import (
    PhaseTimer,
    fill_devices,
    naming_the_bundle,
    open_readers,
    program_cache_dir,
    readers_of_part,
)
from jaxserve.runtime.programs.bundle import read_manifest, sized_like_bundle
from jaxserve.runtime.programs.compile_counter import CompileCounter
from jaxserve.runtime.programs.program_set import ProgramSet
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.sizing.memory_advice import deploy_or_advise
from jaxserve.runtime.sizing.sizes import Sizes
from jaxserve.runtime.sizing.temp_memory import size_pool_by_compiler
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.text.grammars.vocabulary import load_vocabulary
from jaxserve.text.tokenizers.served_tokenizer import load_served_tokenizer
from jaxserve.weights import check_tensors, checkpoint_kv_scales, stored_types
from jaxserve.weights.kv_scales import KVScales

logger = logging.getLogger("jaxserve.worker")

# Facts of programs that may differ between the processes of a mesh, because hosts may differ.
_PER_PROCESS_FACTS = {"process", "cpu", "python"}


@dataclasses.dataclass(frozen=True)
class _EngineParts:
    """The loaded model and compiled programs on the devices of this process, by pipeline stage."""

    deployment: Deployment
    programs: dict[int, ProgramSet]
    calls: LocalCommands | StagedCommands
    host: HostMemory
    info: EngineInfo
    phases: PhaseTimer


def build_engine(config: EngineConfig, nodes: ProcessGroup | None = None) -> tuple[EngineLoop, EngineInfo]:
    """Load, compile and allocate. All errors of the configuration are raised here.

    `nodes` are the processes of a mesh, in which this one has rank 0.
    """
    parts = _prepare(config, nodes)
    calls: DeviceCommands = parts.calls if nodes is None else BroadcastCommands(parts.calls, nodes.broadcast)
    timeline = Timeline()
    executor = DeviceExecutor(
        calls,
        parts.deployment.capacity,
        timeline,
        _substitute(parts),
        int if nodes is None else lambda: nodes.peer_compiles,
        dict if nodes is None else lambda: nodes.peer_stage_times,
        calculates_kv_scales=config.calculate_kv_scales,
        expert_tokens=_expert_tokens(parts.deployment),
    )
    if nodes is not None:
        with nodes.time_limit(config.dist_timeout, "the first step over all processes"):
            executor.connect()
    if parts.deployment.device.platform != "cpu":  # a CPU gains nothing by it, and may still be loading programs
        keys = parts.deployment.parts[-1].program_keys
        logger.info("running each of the %d programs without requests, before the first one comes", len(keys))
        with parts.phases("warm_up"), naming_the_bundle(config):
            executor.warm_up(keys)
    profiling = Profiling(JaxProfiler(timeline, tuple(parts.programs.values())), config.profile_dir)
    speculation = _speculation(parts.deployment)
    loop = _make_loop(config, parts.deployment.sizes, executor, parts.host, timeline, profiling, speculation)
    return loop, msgspec.structs.replace(parts.info, startup_seconds=parts.phases.seconds)


def _substitute(parts: _EngineParts) -> Callable[[ProgramKey], ProgramKey]:
    """Return the function that names the program of a step that has none of its own.

    All programs of pipeline stages are loaded, but on a CPU that drafts, none is without a sampler.
    """
    stages = parts.deployment.stages
    if not stages:
        return parts.programs[0].substitute
    keys = set(stages[-1].program_keys)
    return lambda key: key if key in keys else key._replace(greedy=False)


def build_follower(config: EngineConfig, nodes: ProcessGroup) -> tuple[Callable[[bytes], None], EngineInfo]:
    """Build the engine of a node with a rank above 0, without a scheduler.

    Return the function that runs the calls broadcast by node rank 0.
    """
    parts = _prepare(config, nodes)
    compiles = CompileCounter()
    nodes.own_compiles = lambda: compiles.count
    nodes.own_stage_times = parts.calls.stage_times
    keys, num_ranks = parts.deployment.parts[-1].program_keys, parts.deployment.capacity.num_ranks
    following = FollowerExecutor(parts.calls, keys, num_ranks, nodes.fail_after_cause)
    return following.execute, parts.info


def _prepare(config: EngineConfig, nodes: ProcessGroup | None) -> _EngineParts:
    phases = PhaseTimer()
    with phases("device"):
        devices, local = _find_devices(config, nodes)
        device = local[0]
    with phases("model"):
        source = fetch_files(config)
        served = read_served_checkpoint(config, source)
        model = parse_model_config(served.raw, served.where, served.task)
        check_tensors(source, model, config.load_format)
        stored = stored_types(source, model, config.load_format)
    bundle = read_manifest(Path(config.programs)) if config.programs is not None else None
    if bundle is not None:
        config = sized_like_bundle(config, bundle)
    facts = facts_of_devices(local, config)
    facts = dataclasses.replace(facts, max_devices=len(devices))
    if nodes is not None:
        facts = dataclasses.replace(facts, memory_bytes=nodes.agree(facts.memory_bytes, min))
    deployment = deploy_or_advise(config, model, facts, stored)
    meshes = make_stage_meshes(devices, len(deployment.parts), **deployment.mesh_sizes)
    here = {number: mesh for number, mesh in enumerate(meshes) if not set(local).isdisjoint(mesh.devices.flat)}
    if nodes is not None:
        for mesh in here.values():
            resolve_local_devices(mesh)
    with phases("memory"):
        deployment = size_pool_by_compiler(deployment, here, program_cache_dir(config))
        if nodes is not None:
            deployment = _agree_on_deployment(deployment, meshes, nodes)
    backend, sizes = deployment.backend, deployment.sizes
    logger.info(
        "device: %s%s; attention: %s (%s)", _mesh_prefix(deployment), device.device_kind, backend.name, backend.reason
    )
    if sizes.capacity.max_model_len < sizes.wanted_context:
        logger.info(
            "context length reduced to fit the KV cache: %d tokens instead of %d; more memory for the cache "
            "(--mem-fraction-static, --max-total-tokens) allows more",
            sizes.capacity.max_model_len,
            sizes.wanted_context,
        )
    log_weights(deployment)
    log_drafting(deployment)
    log_pooling(deployment)
    obstacle = deployment.nondeterminism
    answer = f"no, {obstacle}" if obstacle else "yes, a request gives the same bits in any batch"
    logger.info("deterministic inference: %s", answer)
    scales: list[KVScales | None] = [None] * len(deployment.parts)
    if config.kv_cache_dtype != "auto":
        if config.load_format != "dummy" and not config.calculate_kv_scales:
            scales = [checkpoint_kv_scales(source, part.model) for part in deployment.parts]
        log_kv_scales(deployment, scales)
    free_memory = psutil.virtual_memory().available
    host = plan_host_memory(config, deployment, free_memory if nodes is None else nodes.agree(free_memory, min))
    with phases("weights"):
        weights = open_readers(deployment, source)
    # No program is loaded while serving in a mesh, whose processes must choose alike, nor by several stages, nor on a
    # GPU, which would pause.
    behind = nodes is None and device.platform == "cpu" and not deployment.stages
    stages: list[LocalCommands | None] = [None] * len(meshes)
    programs: dict[int, ProgramSet] = {}
    compiled = 0
    for number, mesh in here.items():
        part, own = deployment.parts[number], scales[number]
        params, state, programs[number], count = fill_devices(
            part,
            mesh,
            readers_of_part(deployment, part, weights),
            bundle,
            phases,
            behind=behind,
            kv_scales=() if own is None else own.by_group,
        )
        compiled += count
        stages[number] = LocalCommands(params, state, programs[number], host.pools(number, mesh), mesh)
    calls: LocalCommands | StagedCommands
    if deployment.stages:
        # In one process, the step fails as a whole, and the engine finds it.
        on_failure = logger.error if nodes is None else nodes.fail_after_cause
        with phases("programs"):
            calls, count = connect_stages(deployment, meshes, stages, bundle, on_failure)
        compiled += count
    else:
        [calls] = filter(None, stages)
    if nodes is not None:
        nodes.wait_until_all_ready()
    free = free_bytes(device)
    log_sizes(deployment, free)
    groups = _kv_groups(deployment)
    log_kv_groups(groups, sizes.capacity.page_size)
    log_states(deployment)
    host.log(config, deployment, sum(one.host_bytes for one in stages if one is not None))
    info = EngineInfo(
        max_model_len=sizes.capacity.max_model_len,
        vocab_size=model.vocab_size,
        page_size=sizes.capacity.page_size,
        num_pages=deployment.data * sizes.capacity.num_pages,
        max_running_requests=deployment.data * sizes.capacity.num_slots,
        chunked_prefill_size=sizes.chunked_prefill_size,
        device=device.device_kind,
        dtype=deployment.dtype.name,
        attention_backend=backend.name,
        num_programs=sum(map(len, programs.values())),
        startup_seconds=phases.seconds,
        num_compiled_programs=compiled,
        schedule_policy=config.schedule_policy,
        free_bytes=free,
        working_bytes=sizes.footprint.activations,
        memory_bound=sizes.memory_bound,
        quantization=deployment.weights.method,
        weight_bytes=sizes.footprint.weights,
        deterministic=not deployment.nondeterminism,
        kv_groups=groups,
        num_states=deployment.data * sizes.capacity.num_states,
        state_bytes=sizes.state_bytes,
        uses_priorities=config.uses_priorities,
    )
    return _EngineParts(deployment, programs, calls, host, info, phases)


def _find_devices(config: EngineConfig, nodes: ProcessGroup | None) -> tuple[list[Any], list[Any]]:
    """Return the devices of the mesh (without `nodes`, of this machine), and those that belong to this process."""
    if nodes is None:
        devices = attach(config)
        return devices, devices
    join = functools.partial(
        join_processes,
        rank=nodes.rank,
        count=nodes.count,
        coordinator_port=nodes.coordinator_port,
        host=nodes.host,
        timeout=config.dist_timeout,
    )
    divided = parallelism(config)
    devices = devices_of_all(attach(config, join), divided.num_devices // nodes.count, nodes.count)
    return devices, [device for device in devices if device.process_index == nodes.rank]


def _agree_on_deployment(deployment: Deployment, meshes: Sequence[Mesh], nodes: ProcessGroup) -> Deployment:
    """Reduce the KV cache to what fits every process. Raise `ConfigError` if the processes' programs would differ."""
    capacity = deployment.capacity
    tokens = nodes.agree(capacity.num_pages * capacity.page_size, min)
    if tokens < capacity.num_pages * capacity.page_size:
        config = deployment.config.with_pool_tokens(tokens)
        deployment = deploy(config, deployment.model.config, deployment.device, stored=deployment.stored)
    by_stage = [
        {name: value for name, value in part.builder(mesh).facts().items() if name not in _PER_PROCESS_FACTS}
        for part, mesh in zip(deployment.parts, meshes)
    ]
    facts = {f"stage {number}": own for number, own in enumerate(by_stage)} if deployment.stages else by_stage[0]

    def check(everywhere: list[dict[str, Any]]) -> None:
        for rank, theirs in enumerate(everywhere):
            if found := join_differences(theirs, everywhere[0], there="there", here="on node rank 0"):
                raise ConfigError(f"node rank {rank} would run other programs than node rank 0: {found}")

    nodes.agree(facts, check)
    return deployment


def _kv_groups(deployment: Deployment) -> tuple[KVGroup, ...]:
    pages = deployment.capacity.pages_by_group
    return tuple(
        KVGroup(spec.num_layers, deployment.data * count, spec.window)
        for spec, count in zip(deployment.kv_specs, pages, strict=True)
    )


def _expert_tokens(deployment: Deployment) -> ExpertTokens:
    model, capacity = deployment.model.config, deployment.capacity
    most = max(capacity.token_buckets + capacity.decode_buckets)
    return ExpertTokens(model.mixture_layers, model.num_experts, most * capacity.num_ranks)


def _mesh_prefix(deployment: Deployment) -> str:
    divided = deployment.divided
    if divided.num_devices == 1:
        return ""
    stages = f"pipeline parallel {divided.stages} x " if divided.stages > 1 else ""
    return f"{divided.num_devices} ({stages}data parallel {divided.data} x tensor parallel {divided.tensor}) x "


def _make_loop(
    config: EngineConfig,
    sizes: Sizes,
    executor: DeviceExecutor,
    host: HostMemory,
    timeline: Timeline,
    profiling: Profiling,
    speculation: Speculation | None,
) -> EngineLoop:
    scheduler: AnyScheduler
    if sizes.capacity.encodes:
        scheduler = EncoderScheduler(
            sizes.capacity,
            step_tokens=sizes.chunked_prefill_size,
            limits=QueueLimits.of(config),
            policy=config.schedule_policy,
            priorities=Priorities.of(config),
            prefill_max_requests=config.prefill_max_requests,
            random_seed=config.random_seed,
        )
    else:
        scheduler = _causal_scheduler(config, sizes, host, speculation)
    return EngineLoop(
        scheduler,
        executor,
        overlap=not config.disable_overlap_schedule,
        decode_log_interval=config.decode_log_interval,
        timeline=timeline,
        profiling=profiling,
    )


def _causal_scheduler(
    config: EngineConfig, sizes: Sizes, host: HostMemory, speculation: Speculation | None
) -> Scheduler:
    return Scheduler(
        sizes.capacity,
        chunked_prefill_size=sizes.chunked_prefill_size,
        max_prefill_tokens=sizes.max_prefill_tokens,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        mixed_step_seconds=sizes.max_mixed_step_ms / 1000,
        pooled_time_share=config.pooled_time_share,
        limits=QueueLimits.of(config),
        random_seed=config.random_seed,
        policy=config.schedule_policy,
        priorities=Priorities.of(config),
        retraction_policy=config.retraction_policy,
        prefill_max_requests=config.prefill_max_requests,
        eviction_policy=config.radix_eviction_policy,
        conservativeness=config.schedule_conservativeness,
        prefix_cache=not config.disable_radix_cache,
        num_host_pages=host.pages,
        num_host_states=host.states,
        state_snapshot_interval=config.state_snapshot_interval,
        host_write_policy=config.hicache_write_policy,
        record_cache_events=config.kv_events_config is not None,
        speculation=speculation,
        overlap=not config.disable_overlap_schedule,
        grammars=Grammars(lambda: load_vocabulary(load_served_tokenizer(config))),
    )


def _speculation(deployment: Deployment) -> Speculation | None:
    config, drafting = deployment.config, deployment.drafting
    if drafting is None:
        return None
    cost = 0.0
    if drafting.model is not None:
        own, draft = (device_bytes(params, deployment.axis_sizes) for params in deployment.all_params)
        cost = draft / own
    return Speculation(deployment.capacity, max_requests=config.speculative_disable_by_batch_size, draft_cost=cost)


if __name__ == "__main__":
    sys.exit(run(build_engine, build_follower))
