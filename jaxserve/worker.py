"""Joins a scheduler to an executor: the only module that knows both wings.

`python -m jaxserve.worker` is the engine process; `build_engine` makes the same engine in the caller's.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxserve import model_source
from jaxserve.api_types import EngineInfo
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.process import run
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig, parse_model_config
from jaxserve.models.registry import family
from jaxserve.runtime.executor import DeviceExecutor
from jaxserve.runtime.memory import tree_bytes
from jaxserve.runtime.mesh import make_mesh, shardings
from jaxserve.runtime.programs import ProgramBuilder, build_programs, dtype_of, program_keys
from jaxserve.runtime.sizes import Sizes, attention_problem, resolve_sizes
from jaxserve.runtime.state import DeviceState, make_state, pool_layout, state_specs
from jaxserve.runtime.step import StepContext
from jaxserve.weights.dummy import dummy_params
from jaxserve.weights.load import load_params
from jaxserve.weights.open import open_source
from pallas_kernels.paged_attention import Backend, Problem, choose_backend, target_of

logger = logging.getLogger("jaxserve.worker")


class _Phases:
    """Seconds each phase of the start took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 3)


def build_engine(config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """Load, compile and allocate; everything that can be refused is refused here."""
    phases = _Phases()
    with phases("device"):
        device = _device(config)
    with phases("model"):
        source = model_source.resolve(config.model)
        model = parse_model_config(model_source.read_config(source))
    dtype = dtype_of(config.dtype)
    backend = _backend(config, device, attention_problem(config, model, dtype=dtype))
    logger.info("device: %s; attention: %s (%s)", device.device_kind, backend.name, backend.reason)
    abstract = family(model).abstract(model, dtype)
    [kv_spec] = family(model).kv_specs(model)
    bytes_per_token = pool_layout(kv_spec, num_pages=1, page_size=1, dtype=dtype).bytes_per_token
    sizes = resolve_sizes(config, model, device, weight_bytes=tree_bytes(abstract), bytes_per_token=bytes_per_token)
    mesh = make_mesh([device])
    specs = state_specs(kv_spec, sizes.capacity, vocab_size=model.vocab_size, dtype=dtype)
    context = StepContext(model, backend, sample_rows=16 if device.platform == "cpu" else None)
    builder = ProgramBuilder(context, sizes.capacity, mesh, abstract, specs)
    keys = program_keys(sizes.capacity)
    with ThreadPoolExecutor(2) as pool:
        params = pool.submit(_load, config, source, model, abstract, shardings(mesh, abstract), phases)
        state = pool.submit(_allocate, specs, shardings(mesh, specs), phases)
        with phases("programs"):
            programs, compiled = build_programs(builder, keys, _cache_dir(config))
    executor = DeviceExecutor(params.result(), state.result(), programs, sizes.capacity)
    logger.info("programs: %d, of them %d compiled now, the others loaded", len(programs), compiled)
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, "
        "context_len=%d",
        sizes.capacity.num_pages * sizes.capacity.page_size,
        sizes.chunked_prefill_size,
        sizes.max_prefill_tokens,
        sizes.capacity.num_slots,
        sizes.capacity.max_model_len,
    )
    info = EngineInfo(
        max_model_len=sizes.capacity.max_model_len,
        vocab_size=model.vocab_size,
        page_size=sizes.capacity.page_size,
        num_pages=sizes.capacity.num_pages,
        max_running_requests=sizes.capacity.num_slots,
        chunked_prefill_size=sizes.chunked_prefill_size,
        device=device.device_kind,
        dtype=dtype.name,
        attention_backend=backend.name,
        num_programs=len(programs),
        startup_seconds=phases.seconds,
    )
    return _loop(config, sizes, executor), info


def _device(config: EngineConfig) -> Any:
    if config.device != "auto":
        jax.config.update("jax_platforms", config.device)
    try:
        return jax.devices()[0]
    except RuntimeError as error:
        raise ConfigError(
            f"device={config.device}: jax finds none ({error}); install jaxserve's extra for it"
        ) from error


def _backend(config: EngineConfig, device: Any, problem: Problem) -> Backend:
    try:
        return choose_backend(target_of(device), problem, config.attention_backend)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _load(
    config: EngineConfig,
    source: model_source.ModelSource,
    model: ModelConfig,
    abstract: Any,
    where: Any,
    phases: _Phases,
) -> Any:
    with phases("weights"):
        if config.load_format == "dummy":
            return dummy_params(abstract, where, seed=config.random_seed)
        module = family(model)
        tensors = open_source(source, config.load_format)
        return load_params(abstract, tensors, module.placements(model), where, ignored=module.ignored)


def _allocate(specs: DeviceState, where: DeviceState, phases: _Phases) -> DeviceState:
    with phases("state"):
        return jax.block_until_ready(make_state(specs, where))


def _cache_dir(config: EngineConfig) -> Path | None:
    if config.disable_program_cache:
        return None
    return Path(config.program_cache_dir) if config.program_cache_dir else model_source.home() / "programs"


def _loop(config: EngineConfig, sizes: Sizes, executor: DeviceExecutor) -> EngineLoop:
    scheduler = Scheduler(
        sizes.capacity,
        chunked_prefill_size=sizes.chunked_prefill_size,
        max_prefill_tokens=sizes.max_prefill_tokens,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_queued_requests=config.max_queued_requests,
        random_seed=config.random_seed,
    )
    return EngineLoop(
        scheduler,
        executor,
        overlap=not config.disable_overlap_schedule,
        decode_log_interval=config.decode_log_interval,
    )


if __name__ == "__main__":
    sys.exit(run(build_engine))
