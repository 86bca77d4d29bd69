"""Gets the programs of a deployment at start-up: loads those that an earlier start kept on disk, compiles the others.

Programs are kept in a folder named by `MeshProgramBuilder.fingerprint`, so one that was compiled from other facts is
never found there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxserve.runtime.programs.autotune_cache import autotune_folder, autotune_options, report_tuning
from jaxserve.runtime.programs.builder import MeshProgramBuilder, by_compile_cost, program_path
from jaxserve.runtime.programs.file_lock import exclusive
from jaxserve.runtime.programs.own_files import trusted_folder
from jaxserve.runtime.programs.program_set import Program, ProgramSet, by_requests, needed_first
from jaxserve.runtime.step.program import ProgramKey

logger = logging.getLogger("jaxserve.runtime")


def build_programs(
    builder: MeshProgramBuilder,
    keys: Sequence[ProgramKey],
    cache_dir: Path | None,
    *,
    background: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[ProgramSet, int]:
    """Return the programs by key, and how many had to be compiled.

    Compiles in parallel, under a progress bar on stderr. Of processes that share `cache_dir` one compiles, and the
    others load what it has kept. If all programs are on disk and `background` is true, returns once those that a server
    needs first are loaded, and loads the others in a thread. `check` is called before each program is compiled; what it
    raises ends the build.
    """
    folder = None if cache_dir is None else trusted_folder(cache_dir / builder.fingerprint())
    paths = {key: program_path(folder, key) for key in keys} if folder is not None else {}
    if not _missing(keys, paths):
        return _load(builder, keys, paths, background)
    with exclusive(folder):
        if missing := _missing(keys, paths):
            tuned = autotune_folder(builder.mesh.devices.flat[0], cache_dir)
            with report_tuning(tuned, len(missing)):
                made, compiled = _build(builder.with_options(autotune_options(tuned)), keys, paths, check)
            return ProgramSet(made), compiled
    return _load(builder, keys, paths, background)


def are_kept(builder: MeshProgramBuilder, keys: Sequence[ProgramKey], cache_dir: Path | None) -> bool:
    """Return whether `build_programs` would find all programs on disk, and compile none."""
    if cache_dir is None:
        return False
    folder = cache_dir / builder.fingerprint()
    return not _missing(keys, {key: program_path(folder, key) for key in keys})


def _load(
    builder: MeshProgramBuilder, keys: Sequence[ProgramKey], paths: Mapping[ProgramKey, Path], background: bool
) -> tuple[ProgramSet, int]:
    first = needed_first(keys) if background else keys
    made, compiled = _build(builder, first, paths)
    pending = by_requests([key for key in keys if key not in made], builder.capacity)
    if not pending:
        return ProgramSet(made), compiled

    def load(key: ProgramKey) -> Program:
        try:
            return builder.load(key, paths[key])
        except Exception:
            paths[key].unlink(missing_ok=True)  # the next start compiles it
            raise

    return ProgramSet(made, pending, load), compiled


def _missing(keys: Sequence[ProgramKey], paths: Mapping[ProgramKey, Path]) -> list[ProgramKey]:
    return [key for key in keys if key not in paths or not paths[key].exists()]


def _build(
    builder: MeshProgramBuilder,
    keys: Sequence[ProgramKey],
    paths: Mapping[ProgramKey, Path],
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[ProgramKey, Program], int]:
    missing = _missing(keys, paths)

    def make(key: ProgramKey) -> tuple[ProgramKey, jax.stages.Compiled, bool]:
        if key not in missing:
            try:
                return key, builder.load(key, paths[key]), False
            except Exception as error:  # a damaged pickle may raise anything
                logger.warning("kept program %s can't be loaded (%r): compiling it again", paths[key], error)
        check()
        compiled = builder.compile(key)
        if key in paths:
            builder.store(compiled, paths[key])
        return key, compiled, True

    order = by_compile_cost(keys)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(_progress(pool.map(make, order), len(order), bool(missing)))
    return {key: program for key, program, _ in made}, sum(compiled for _, _, compiled in made)


def _progress(items: Iterator[Any], total: int, compiling: bool) -> Iterator[Any]:
    with tqdm(items, total=total, desc="Compiling programs", unit="program", disable=not compiling) as bar:
        for made in bar:
            bar.set_postfix_str(str(made[0]))
            yield made
