"""The programs' working memory by the compiler's own figure: what the KV pool is sized by where memory bounds it.

A program has the pool's size in its shapes, so the figure is that of the largest programs for an estimated pool; how
large the pool is changes it little, and a margin is added. It is kept on disk, so that only a first start compiles for
it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.file_lock import alone
from jaxserve.runtime.programs.own_files import own_folder, write_own
from jaxserve.runtime.sizing.deployment import Deployment, deploy
from jaxserve.runtime.step.batch import ProgramKey

_FILE = "working-memory.json"


class WorkingMemory(msgspec.Struct, frozen=True):
    """Bytes on each device, and the program that takes the most."""

    temp_bytes: int
    program: str

    @property
    def with_margin(self) -> int:
        """What to keep free for it."""
        return self.temp_bytes + self.temp_bytes // 16


def sized_by_compiler(deployment: Deployment, mesh: Mesh, cache_dir: Path | None) -> Deployment:
    """The deployment with the pool that the compiler's figure leaves room for; unchanged where memory has no say.

    Raises `ConfigError`: `NoRoomError` where that is nothing.
    """
    if not deployment.sizes.memory_bound:
        return deployment
    builder = deployment.builder(mesh)
    folder = None if cache_dir is None else own_folder(cache_dir / builder.fingerprint())
    figure = _read(folder)
    if figure is None:
        with alone(folder):
            figure = _read(folder)  # by whoever had the folder before
            if figure is None:
                figure = compiled_figure(deployment, builder)
                if folder is not None:
                    write_own(folder / _FILE, msgspec.json.encode(figure))
    return resized(deployment, figure)


def resized(deployment: Deployment, figure: WorkingMemory) -> Deployment:
    """The same with this working memory. Raises `ConfigError`: `NoRoomError`."""
    return deploy(
        deployment.config,
        deployment.model,
        deployment.device,
        stored=deployment.stored,
        activations=figure.with_margin,
    )


def compiled_figure(deployment: Deployment, builder: ProgramBuilder) -> WorkingMemory:
    """Of the largest program of each kind, which is one of those that need most."""
    largest = {(key.kind, key.greedy): key for key in sorted(deployment.keys, key=lambda key: key.size)}

    def figure(key: ProgramKey) -> WorkingMemory:
        memory: Any = builder.compile(key).memory_analysis()
        return WorkingMemory(memory.temp_size_in_bytes, str(key))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return max(pool.map(figure, largest.values()), key=lambda one: one.temp_bytes)


def _read(folder: Path | None) -> WorkingMemory | None:
    if folder is None:
        return None
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=WorkingMemory)
    except (OSError, msgspec.MsgspecError):
        return None
