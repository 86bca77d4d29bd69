"""Puts a deployment on its devices: loads the weights, allocates the state, and loads or compiles the programs.

On a CPU all of it happens at once. On an accelerator nothing is copied while programs are compiled: XLA chooses kernels
by trial runs there, which need free memory and a device that does nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve import model_source
from jaxserve.config.model_files import draft_files
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.models.draft_heads import mtp
from jaxserve.models.layout import AnyModel
from jaxserve.models.registry import abstract_params
from jaxserve.quant import WeightChoice
from jaxserve.runtime.devices.mesh import shardings
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.bundle import BundleManifest, BundlePart, load_bundle, stage_name
from jaxserve.runtime.programs.program_cache import are_kept, build_programs
from jaxserve.runtime.programs.program_set import ProgramSet
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.step.state import DeviceState, make_state
from jaxserve.weights import WeightReader, build_params, check_tensors, open_source, open_weights

logger = logging.getLogger("jaxserve.runtime")


class PhaseTimer:
    """Measures the seconds of each phase of start-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 3)


def open_readers(deployment: Deployment, source: ModelSource) -> list[WeightReader]:
    """Return the readers of the weights of the model, and of a draft model if there is one.

    Raises `ConfigError` if the tensors of a draft model don't fit its config.
    """
    config, drafting = deployment.config, deployment.drafting

    def reader(source: ModelSource, model: AnyModel, params: Any, choice: WeightChoice, part: str = "") -> WeightReader:
        return open_weights(
            source,
            params,
            dense=abstract_params(model, deployment.dtype),
            quantization=model.config.quantization,
            on_the_fly=choice.on_the_fly,
            load_format=config.load_format,
            seed=config.random_seed,
            part=part,
        )

    readers = [reader(source, deployment.model, deployment.params, deployment.weights)]
    if drafting is not None and drafting.model is not None:
        name, part = config.speculative_model, ""
        draft = source if name is None else draft_files(config)
        if name is None:
            part = mtp.prefix_of(deployment.model.config)
            _check_own_layer(source, config, part)
        check_tensors(draft, drafting.model.config, config.load_format, part=part)
        readers.append(reader(draft, drafting.model, drafting.params, drafting.weights, part))
    return readers


def readers_of_part(whole: Deployment, part: Deployment, readers: Sequence[WeightReader]) -> list[WeightReader]:
    """Return the readers of a pipeline stage, from those of the whole deployment."""
    if part is whole:
        return list(readers)
    model, *draft = readers
    return [model.of_part(whole.params, part.params), *(draft if part.drafting is not None else ())]


def _check_own_layer(source: ModelSource, config: EngineConfig, part: str) -> None:
    """Raise `ConfigError` if a checkpoint has nothing of the layer that drafts, though its config counts one."""
    if config.load_format == "dummy":
        return
    if source.kind == "orbax" or not any(name.startswith(part) for name in open_source(source).infos):
        raise ConfigError(
            f"speculative_method=mtp: {source.path} lacks the layer that drafts ({part}*), as many quantized and "
            "converted copies of a model do; take the original checkpoint, or speculative_method=ngram"
        )


def fill_devices(
    deployment: Deployment,
    mesh: Mesh,
    weights: Sequence[WeightReader],
    bundle: BundleManifest | None,
    phases: PhaseTimer,
    *,
    behind: bool,
    kv_scales: Sequence[np.ndarray] = (),
) -> tuple[Any, DeviceState, ProgramSet, int]:
    """Return the weights, the state, the programs, and how many of these were compiled.

    The phase of the programs is called `compile` if any was compiled, else `programs`. With `behind`, programs that a
    server doesn't need first are loaded while it serves. `weights` are those of the model, and of a draft model if
    there is one. `kv_scales` are those of an fp8 KV cache by KV group, if they aren't 1. Raises the first error of any
    part.
    """
    builder = deployment.builder(mesh)
    with ThreadPoolExecutor(2) as pool:

        def fill() -> tuple[Future[Any], Future[DeviceState]]:
            params = pool.submit(_load, deployment, weights, mesh, phases)
            where = shardings(mesh, deployment.state)
            return params, pool.submit(_allocate, deployment.state, where, kv_scales, phases)

        compiles_first = deployment.device.platform != "cpu" and _may_compile(deployment, builder, bundle)
        filling = None if compiles_first else fill()

        def check() -> None:
            if filling is not None and filling[0].done():
                filling[0].result()

        with phases("programs"):
            programs = None if bundle is None else _from_bundle(deployment, builder, bundle)
            compiled = 0
            if programs is None:
                cache = program_cache_dir(deployment.config)
                keys = deployment.program_keys
                programs, compiled = build_programs(builder, keys, cache, background=behind, check=check)
        if compiled:
            phases.seconds["compile"] = phases.seconds.pop("programs")
        params, state = filling or fill()
    _log_programs(programs, compiled)
    return params.result(), state.result(), programs, compiled


def program_cache_dir(config: EngineConfig) -> Path | None:
    """Return the folder in which programs are kept, or None."""
    if config.disable_program_cache:
        return None
    return Path(config.program_cache_dir) if config.program_cache_dir else model_source.jaxserve_home() / "programs"


@contextmanager
def naming_the_bundle(config: EngineConfig) -> Iterator[None]:
    """Turn an error of a bundled program's first run into a `ConfigError` that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if config.programs is None:
            raise
        raise ConfigError(
            f"programs={config.programs}: a program failed in its first run ({error}); leave --programs out"
        ) from error


def _load(deployment: Deployment, weights: Sequence[WeightReader], mesh: Mesh, phases: PhaseTimer) -> Any:
    with phases("weights"):
        if len(weights) == 1:
            return build_params(deployment.params, shardings(mesh, deployment.params), weights[0])
        specs = deployment.all_params
        return tuple(map(build_params, specs, shardings(mesh, specs), weights))


def _allocate(
    specs: DeviceState, where: DeviceState, kv_scales: Sequence[np.ndarray], phases: PhaseTimer
) -> DeviceState:
    with phases("state"):
        return jax.block_until_ready(make_state(specs, where, kv_scales))


def _may_compile(deployment: Deployment, builder: ProgramBuilder, bundle: BundleManifest | None) -> bool:
    if bundle is not None:
        return bool(bundle.target)
    return not are_kept(builder, deployment.program_keys, program_cache_dir(deployment.config))


def _from_bundle(deployment: Deployment, builder: ProgramBuilder, bundle: BundleManifest) -> ProgramSet | None:
    assert deployment.config.programs is not None
    part = BundlePart(stage_name(deployment.model.stage), builder, deployment.program_keys)
    loaded = load_bundle(Path(deployment.config.programs), bundle, part)
    return None if loaded is None else ProgramSet(loaded)


def _log_programs(programs: ProgramSet, compiled: int) -> None:
    if pending := programs.num_pending:
        total = len(programs)
        logger.info("programs: %d, of them %d loaded; the others are loaded while serving", total, total - pending)
    else:
        logger.info("programs: %d, of them %d compiled now, the others loaded", len(programs), compiled)
