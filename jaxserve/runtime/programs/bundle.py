"""A bundle: a folder of compiled programs with a manifest of all they depend on, for machines of the same kind.

A bundle is code, as a wheel is: load none that you wouldn't install. One that another user owns or may write is
refused. It holds no weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.error_texts import join_differences
from jaxserve.errors import ConfigError
from jaxserve.models.layout import Stage
from jaxserve.runtime.programs.builder import MeshProgramBuilder, program_path
from jaxserve.runtime.programs.own_files import UntrustedFileError, check_owner
from jaxserve.runtime.step.program import ProgramKey

logger = logging.getLogger("jaxserve.runtime")

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class BundlePart:
    """The programs of one builder: all of a deployment, or those of a pipeline stage or of a transfer between two.

    Those of a stage or a transfer are in a folder of this `name`, which is empty for a deployment without stages.
    """

    name: str
    builder: MeshProgramBuilder
    keys: Sequence[ProgramKey]

    def program_name(self, key: ProgramKey) -> str:
        """Return the name of a program among those of all parts."""
        return f"{self.name}/{key}" if self.name else str(key)

    @property
    def program_names(self) -> list[str]:
        """The names of its programs."""
        return list(map(self.program_name, self.keys))


def stage_name(stage: Stage | None) -> str:
    """Return the name of the part of a pipeline stage."""
    return "" if stage is None else f"stage-{stage.index}"


def transfer_name(source: int) -> str:
    """Return the name of the part of the transfer from a pipeline stage to the next one."""
    return f"transfer-{source}"


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The model, settings and facts that a bundle was compiled for.

    `facts` are those of the builder, by name of the part if there are several; `settings` are all settings that differ
    from their defaults. `target` names the description of the device that it was compiled for if none was attached,
    else it is empty. `num_slots` and `num_states` are those of a rank, if the model keeps states.
    """

    format: int
    model: str
    settings: dict[str, Any]
    pool_tokens: int
    programs: list[str]
    facts: dict[str, Any]
    target: str = ""
    num_slots: int = 0
    num_states: int = 0


def write_manifest(folder: Path, config: EngineConfig, parts: Sequence[BundlePart], target: str = "") -> None:
    """Write the manifest. Write it last: a folder that has one is complete."""
    given = msgspec.to_builtins(config.masked())
    defaults = msgspec.to_builtins(EngineConfig())
    capacity = parts[0].builder.capacity
    facts = {part.name: part.builder.facts() for part in parts}
    manifest = BundleManifest(
        format=_FORMAT,
        model=config.model,
        settings={name: value for name, value in given.items() if value != defaults[name]},
        pool_tokens=capacity.num_pages * capacity.page_size,
        programs=[name for part in parts for name in part.program_names],
        facts=facts.get("", facts),
        target=target,
        num_slots=capacity.num_slots if capacity.num_states else 0,
        num_states=capacity.num_states,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> BundleManifest:
    """Read the manifest. Raises `ConfigError` if it can't be read, or if another user may have written it."""
    path = folder / MANIFEST
    try:
        check_owner(folder)
        manifest = msgspec.json.decode(path.read_bytes(), type=BundleManifest)
    except UntrustedFileError as error:
        raise ConfigError(f"programs={folder}: {error}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"programs={folder} is no bundle: {path.name} can't be read ({error}); "
            f"make one with `jaxserve compile --output {folder}`"
        ) from None
    if manifest.format != _FORMAT:
        raise ConfigError(
            f"programs={folder} has format {manifest.format}, this jaxserve reads {_FORMAT}: make it again"
        )
    return manifest


def sized_like_bundle(config: EngineConfig, manifest: BundleManifest) -> EngineConfig:
    """Return the configuration with the bundle's pool sizes, which would else vary a little with the free memory.

    Raises `ConfigError` if the bundle is for another number of pipeline stages.
    """
    if (stages := manifest.settings.get("pp_size", 1)) != config.pp_size:
        raise ConfigError(
            f"programs={config.programs} was made for pp_size={stages}, and pp_size is {config.pp_size}: set --pp-size "
            f"{stages}, or make it again with `jaxserve compile --output {config.programs} --pp-size {config.pp_size}`"
        )
    is_sized = config.pool_tokens is not None or config.kv_cache_memory_bytes is not None
    sizes = {"max_total_tokens": manifest.pool_tokens} if manifest.pool_tokens and not is_sized else {}
    if manifest.num_states:
        sizes |= {"max_running_requests": manifest.num_slots, "max_mamba_cache_size": manifest.num_states}
    return config.with_defaults(**sizes)


def load_bundle(
    folder: Path, manifest: BundleManifest, part: BundlePart
) -> dict[ProgramKey, Callable[..., Any]] | None:
    """Load the programs of a part by key. Raises `ConfigError` naming facts that differ, or a program that can't be
    loaded.

    A bundle for a target may turn out not to load on the real device: then logs why and returns None.
    """
    facts = json.loads(json.dumps(part.builder.facts()))
    made_for = manifest.facts[part.name] if part.name else manifest.facts
    if differences := join_differences(
        _comparable(made_for, manifest), _comparable(facts, manifest), there="in the bundle", here="here"
    ):
        target = f" --target {manifest.target}" if manifest.target else ""
        raise ConfigError(
            f"programs={folder / part.name} was made for something else: {differences}; "
            f"make it again with `jaxserve compile --output {folder}{target}`, or leave --programs out"
        )

    def load(key: ProgramKey) -> tuple[ProgramKey, Callable[..., Any]]:
        path = program_path(folder / part.name, key)
        try:
            return key, part.builder.load(key, path)
        except UntrustedFileError as error:
            raise ConfigError(f"programs={folder}: {error}") from None
        except Exception as error:  # a damaged pickle may raise anything
            raise _LoadError(f"programs={folder}: {path.relative_to(folder)} can't be loaded ({error!r})") from None

    try:
        with ThreadPoolExecutor() as pool:
            return dict(pool.map(load, part.keys))
    except _LoadError as error:
        if manifest.target:
            logger.warning("%s: compiling all programs on this device instead", error)
            return None
        raise ConfigError(f"{error}; make it again with `jaxserve compile --output {folder}`") from None


class _LoadError(Exception):
    """A program of a bundle that can't be loaded."""


def _comparable(facts: Mapping[str, Any], manifest: BundleManifest) -> dict[str, Any]:
    """Return the facts that must be equal. A bundle for a target may have another platform and compiler."""
    if not manifest.target:
        return dict(facts)
    found = {**facts, "compiler": ""}
    if "attention" in facts:
        found["attention"] = {**facts["attention"], "target": {**facts["attention"]["target"], "platform": ""}}
    return found
