"""The manifest of a folder that `jaxserve convert` wrote: its parameters, and the size of each checkpoint file.

It is read before any weights, so that a folder that was copied only in part is found at once, without importing Orbax,
which is slow to import.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.model_source import CHECKPOINT_FILE
from jaxserve.weights.mismatch import join_names

PARAMS_FOLDER = "params"
"""The folder of the Orbax checkpoint, inside that of `jaxserve convert`."""
_FORMAT = 2


class StoredParameter(msgspec.Struct, frozen=True):
    """A parameter as it is stored, independent of any mesh: each of its files is an array of shape `chunks`."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a manifest. `model` is shown to people only.

    `files` maps paths relative to the folder to sizes in bytes; `parameters` are keyed by dotted name.
    """

    format: int
    jaxserve: str
    model: str
    parameters: dict[str, StoredParameter]
    files: dict[str, int]


def write_manifest(folder: Path, *, version: str, model: str, parameters: dict[str, StoredParameter]) -> None:
    """Write the manifest. Call it last: it lists the checkpoint's files as they are now."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted((folder / PARAMS_FOLDER).rglob("*"))
        if path.is_file()
    }
    manifest = CheckpointManifest(format=_FORMAT, jaxserve=version, model=model, parameters=parameters, files=files)
    (folder / CHECKPOINT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the manifest of a complete folder. Raise `ConfigError` naming the files that are missing or cut short."""
    path = folder / CHECKPOINT_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=CheckpointManifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} can't be read ({error}); copy the folder again, or run `jaxserve convert` again"
        ) from error
    if manifest.format != _FORMAT:
        raise ConfigError(
            f"{folder} has format {manifest.format} (written by jaxserve {manifest.jaxserve}), this jaxserve reads "
            f"{_FORMAT}: run `jaxserve convert` again"
        )
    outside = [name for name in manifest.files if Path(name).is_absolute() or ".." in Path(name).parts]
    broken = [name for name, each in manifest.parameters.items() if not _has_valid_chunks(each)]
    if outside or broken:
        problem = f"names a file outside, {outside[0]!r}" if outside else f"has impossible chunks for {broken[0]}"
        raise ConfigError(f"{path} {problem}: run `jaxserve convert` again")
    sizes = {name: _size(folder / name) for name in manifest.files}
    missing = [name for name, size in sizes.items() if size is None]
    other = [
        f"{name} ({size:,} bytes instead of {manifest.files[name]:,})"
        for name, size in sizes.items()
        if size is not None and size != manifest.files[name]
    ]
    problems = [("missing", missing), ("of another size", other)]
    parts = [f"{len(names)} of its {len(sizes)} files {what}: {join_names(names)}" for what, names in problems if names]
    if parts:
        raise ConfigError(f"{folder} is incomplete: {'; '.join(parts)}. Copy it again from where it was made")
    return manifest


def _has_valid_chunks(stored: StoredParameter) -> bool:
    """Return whether its chunks have a shape that can make up the parameter."""
    sizes = zip(stored.chunks, stored.shape)
    return len(stored.chunks) == len(stored.shape) and all(1 <= chunk <= length for chunk, length in sizes)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # ValueError: not a valid file name
        return None
