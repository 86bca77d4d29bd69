"""What a folder of `jaxserve convert` says of itself: its parameters, and the size of every file of its checkpoint.

It is read before any weight is: a folder that was copied only in part is found at once, and without Orbax, which takes
its time to import.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.model_source import CHECKPOINT
from jaxserve.weights.mismatch import listed

PARAMS = "params"
"""The Orbax checkpoint inside the folder."""
_FORMAT = 2


class StoredParameter(msgspec.Struct, frozen=True):
    """A parameter as it is stored, whatever mesh it is for: in files of `chunks` each."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is for people; `files` are bytes by path from the folder, `parameters` by dotted name."""

    format: int
    jaxserve: str
    model: str
    parameters: dict[str, StoredParameter]
    files: dict[str, int]


def write_manifest(folder: Path, *, version: str, model: str, parameters: dict[str, StoredParameter]) -> None:
    """Written last: it lists the files of the checkpoint as they are then."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted((folder / PARAMS).rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(format=_FORMAT, jaxserve=version, model=model, parameters=parameters, files=files)
    (folder / CHECKPOINT).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole folder. Raises `ConfigError` naming the files that are missing or cut short."""
    path = folder / CHECKPOINT
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read ({error}); copy the folder again, or make it anew with "
                          "`jaxserve convert`") from error  # fmt: skip
    if manifest.format != _FORMAT:
        raise ConfigError(
            f"{folder} has format {manifest.format} (written by jaxserve {manifest.jaxserve}), this jaxserve reads "
            f"{_FORMAT}: make it anew with `jaxserve convert`"
        )
    outside = [name for name in manifest.files if Path(name).is_absolute() or ".." in Path(name).parts]
    broken = [name for name, each in manifest.parameters.items() if not _is_cut(each)]
    if outside or broken:
        what = f"a file outside of it, {outside[0]!r}" if outside else f"chunks of no sensible shape for {broken[0]}"
        raise ConfigError(f"{path} names {what}: make the folder anew with `jaxserve convert`")
    sizes = {name: _size(folder / name) for name in manifest.files}
    missing = [name for name, size in sizes.items() if size is None]
    other = [
        f"{name} ({size:,} bytes instead of {manifest.files[name]:,})"
        for name, size in sizes.items()
        if size is not None and size != manifest.files[name]
    ]
    faults = [("missing", missing), ("of another size", other)]
    parts = [f"{len(names)} of its {len(sizes)} files {what}: {listed(names)}" for what, names in faults if names]
    if parts:
        raise ConfigError(f"{folder} is not whole, {'; '.join(parts)}. Copy it again from where it was made")
    return manifest


def _is_cut(stored: StoredParameter) -> bool:
    """Whether its chunks can be what it is made of."""
    sizes = zip(stored.chunks, stored.shape)
    return len(stored.chunks) == len(stored.shape) and all(1 <= chunk <= length for chunk, length in sizes)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # a name may be none
        return None
