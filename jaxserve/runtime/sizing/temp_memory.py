"""Sizes the KV pool by the working memory that the compiler reports for the programs, if memory limits the pool.

The size of the pool is part of a program's shapes, so the largest programs are compiled for an estimated pool first.
The pool's size changes their working memory little, and a margin is added. The result is kept on disk, so that only the
first start has to compile for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from jax.sharding import Mesh
from tqdm import tqdm

from jaxserve.runtime.programs.autotune_cache import autotune_folder, autotune_options, report_tuning
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.file_lock import exclusive
from jaxserve.runtime.programs.own_files import trusted_folder, write_private
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.step.kv_scales import KV_SCALES_KEY
from jaxserve.runtime.step.program import ProgramKey

# A deployment with the program of KV scales has another file, as that program isn't among the facts of the others.
_FILE, _FILE_WITH_KV_SCALES = "working-memory.json", "working-memory-kv-scales.json"


class TempMemory(msgspec.Struct, frozen=True):
    """The working memory on each device in bytes, and the program that needs it."""

    temp_bytes: int
    program: str

    @property
    def with_margin(self) -> int:
        """Bytes to keep free for it."""
        return self.temp_bytes + self.temp_bytes // 16


def size_pool_by_compiler(deployment: Deployment, meshes: Mapping[int, Mesh], cache_dir: Path | None) -> Deployment:
    """Return the deployment with a pool that leaves the working memory free; unchanged if memory isn't the limit.

    `meshes` are those of the parts to measure, by number. Raises `ConfigError`, such as `InsufficientMemoryError` if no
    memory is left for the pool.
    """
    if not deployment.sizes.memory_bound:
        return deployment
    found = [_measured(deployment.parts[number], mesh, cache_dir) for number, mesh in meshes.items()]
    return with_temp_memory(deployment, max(found, key=lambda one: one.temp_bytes))


def _measured(deployment: Deployment, mesh: Mesh, cache_dir: Path | None) -> TempMemory:
    """Return the working memory of a deployment's programs, from the disk if it was measured before."""
    builder = deployment.builder(mesh)
    folder = None if cache_dir is None else trusted_folder(cache_dir / builder.fingerprint())
    name = _FILE_WITH_KV_SCALES if KV_SCALES_KEY in deployment.program_keys else _FILE
    path = None if folder is None else folder / name
    measured = _read(path)
    if measured is None:
        with exclusive(folder):
            measured = _read(path)  # another process may have written it meanwhile
            if measured is None:
                measured = measure_temp_memory(deployment, builder, cache_dir)
                if path is not None:
                    write_private(path, msgspec.json.encode(measured))
    return measured


def with_temp_memory(deployment: Deployment, measured: TempMemory) -> Deployment:
    """Return the same deployment with this working memory. Raises `ConfigError` as `deploy` does."""
    return deploy(
        deployment.config,
        deployment.model.config,
        deployment.device,
        stored=deployment.stored,
        activations=measured.with_margin,
    )


def measure_temp_memory(deployment: Deployment, builder: ProgramBuilder, cache_dir: Path | None = None) -> TempMemory:
    """Return the largest working memory; the largest program of some kind needs it, so only these are compiled.

    On a GPU, the kernels that XLA chooses for these are kept in `cache_dir`.
    """
    largest = largest_programs(deployment)
    tuned = autotune_folder(builder.mesh.devices.flat[0], cache_dir)
    builder = builder.with_options(autotune_options(tuned))

    def measure(key: ProgramKey) -> TempMemory:
        memory: Any = builder.compile(key).memory_analysis()
        return TempMemory(memory.temp_size_in_bytes, str(key))

    with report_tuning(tuned, len(largest)), ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(measure, largest)
        with tqdm(found, total=len(largest), desc="Sizing the KV cache", unit="program") as bar:
            return max(bar, key=lambda one: one.temp_bytes)


def largest_programs(deployment: Deployment) -> list[ProgramKey]:
    """Return the largest program of each kind that runs a model."""
    keys = [key for key in deployment.program_keys if KINDS[key.kind].takes_weights]
    largest = {(key.kind, key.greedy): key for key in sorted(keys, key=lambda key: key.size)}
    return list(largest.values())


def _read(path: Path | None) -> TempMemory | None:
    if path is None:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=TempMemory)
    except (OSError, msgspec.MsgspecError):
        return None
