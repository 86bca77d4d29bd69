"""A folder of compiled programs with a manifest of all they depend on: made on one machine, loaded on others like it.

A bundle is code, as a wheel is: load none that you wouldn't install; one that another user owns or may write is
refused. Weights are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.programs.builder import ProgramBuilder, program_path
from jaxserve.runtime.programs.own_files import ForeignFileError, check_own
from jaxserve.runtime.programs.program_set import Key

MANIFEST = "manifest.json"
_FORMAT = 1
_DIFFERENCES_SHOWN = 4


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle was made of. `facts` are `ProgramBuilder.facts`; `settings` those that weren't left at default."""

    format: int
    model: str
    settings: dict[str, Any]
    pool_tokens: int
    programs: list[str]
    facts: dict[str, Any]


def write_manifest(folder: Path, config: EngineConfig, builder: ProgramBuilder, keys: Sequence[Key]) -> None:
    """Written last: a folder that has one is whole."""
    given = msgspec.to_builtins(config)
    defaults = msgspec.to_builtins(EngineConfig())
    manifest = Manifest(
        format=_FORMAT,
        model=config.model,
        settings={name: value for name, value in given.items() if value != defaults[name]},
        pool_tokens=builder.capacity.num_pages * builder.capacity.page_size,
        programs=[str(key) for key in keys],
        facts=builder.facts(),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Raises `ConfigError` where there is none that can be read, or another user may have written it."""
    path = folder / MANIFEST
    try:
        check_own(folder)
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except ForeignFileError as error:
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


def sized_like_bundle(config: EngineConfig, manifest: Manifest) -> EngineConfig:
    """The configuration with the bundle's pool, which memory would make a little larger or smaller at every start."""
    if config.max_total_tokens is not None:
        return config
    return msgspec.structs.replace(config, max_total_tokens=manifest.pool_tokens)


def load_bundle(
    folder: Path, manifest: Manifest, builder: ProgramBuilder, keys: Sequence[Key]
) -> dict[Key, Callable[..., Any]]:
    """Its programs by key. Raises `ConfigError` naming what differs, or what is missing or damaged."""
    differences = list(_differences(manifest.facts, json.loads(json.dumps(builder.facts()))))
    if differences:
        more = f" and {len(differences) - _DIFFERENCES_SHOWN} more" if len(differences) > _DIFFERENCES_SHOWN else ""
        raise ConfigError(
            f"programs={folder} was made for something else: {'; '.join(differences[:_DIFFERENCES_SHOWN])}{more}; "
            f"make it again with `jaxserve compile --output {folder}`, or leave --programs out"
        )

    def load(key: Key) -> tuple[Key, Callable[..., Any]]:
        try:
            return key, builder.load(key, program_path(folder, key))
        except ForeignFileError as error:
            raise ConfigError(f"programs={folder}: {error}") from None
        except Exception as error:  # a damaged pickle may raise anything
            raise ConfigError(
                f"programs={folder}: {program_path(folder, key).name} can't be loaded ({error!r}); make it again with "
                f"`jaxserve compile --output {folder}`"
            ) from None

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(load, keys))


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[str]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            yield from _differences(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
    elif theirs != ours:
        yield f"{name} is {theirs!r} in the bundle and {ours!r} here"
