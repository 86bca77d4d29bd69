"""Finds the files of the model that `--model` names, and downloads those that aren't on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from jaxserve.errors import ModelNotFoundError
from jaxserve.model_source.builtin import builtin_path, is_pulled, pull, suggest_builtin
from jaxserve.model_source.builtin_models import BUILTIN_MODELS
from jaxserve.model_source.fields import Fields, read_json
from jaxserve.model_source.gguf_config import config_from_gguf
from jaxserve.model_source.gguf_metadata import MAGIC, GGUFMetadata
from jaxserve.model_source.hub import HUB_ID, HubVersion, hub_folder

_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_HUB_FILES = ("*.safetensors", *_TOKENIZER_FILES)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_MODULE_CONFIGS = "[0-9]_*/config.json"
# What tells a model's config and what it is for
_CONFIG_FILES = (
    "config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
    _MODULE_CONFIGS,
)

_MAIN = HubVersion()

CHECKPOINT_FILE = "jaxserve_checkpoint.json"
"""The manifest of a folder of `jaxserve convert`, by which the folder is recognized."""
_ORBAX_FILES = ("_CHECKPOINT_METADATA", "manifest.ocdbt", "_METADATA")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model on this machine: a Hugging Face folder, one GGUF file, or a folder of `jaxserve convert`.

    `name` is shown to people only.
    """

    path: Path
    kind: Literal["folder", "gguf", "orbax"]
    name: str

    @property
    def config_file(self) -> Path:
        """The file that holds its config."""
        return self.path if self.kind == "gguf" else self.path / "config.json"


def resolve(model: str, version: HubVersion = _MAIN, *, offline: bool = False) -> ModelSource:
    """Return the files of `model`: a built-in name, a folder, a .gguf file, or a hub id, tried in this order.

    `version` is that of a hub model. A built-in or hub model that isn't on this machine is downloaded, unless
    `offline`. Raises `ModelNotFoundError`, which says what was looked for and what to do.
    """
    if model in BUILTIN_MODELS:
        if offline and not is_pulled(model):
            raise ModelNotFoundError(
                f"model {model!r} is not at {builtin_path(model)}, or is damaged there, and downloads are off: "
                f"run `jaxserve pull {model}` where the network is"
            )
        pulled = pull(model)
        return ModelSource(pulled, "folder" if pulled.is_dir() else "gguf", model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.is_file():
        return _gguf(path)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise ModelNotFoundError(f"--model {model!r}: there is no such file or folder")
    if HUB_ID.fullmatch(model):
        return _folder(hub_folder(model, version, _HUB_FILES, offline=offline), model)
    raise ModelNotFoundError(
        f"--model {model!r} is no built-in name, no folder or .gguf file here, and no hub id (org/name); "
        f"{suggest_builtin(model)}"
    )


def resolve_tokenizer(model: str, version: HubVersion = _MAIN) -> ModelSource:
    """Return the files of a model's tokenizer. Raises `ModelNotFoundError`.

    Like `resolve`, but downloads no weights from the hub, and accepts a folder that holds only the tokenizer's files.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path, "folder", path.resolve().name)
    if is_hub_id(model):
        return ModelSource(hub_folder(model, version, _TOKENIZER_FILES, offline=False), "folder", model)
    return resolve(model)


def find_tokenizer_files(folder: Path) -> list[Path]:
    """Return the small files of a model's folder that its tokenizer needs, and those of sentence-transformers.

    Its config and weight indices are not among them.
    """
    others = (folder / "config.json", folder / CHECKPOINT_FILE)
    patterns = (*_TOKENIZER_FILES, _MORE_TEMPLATES, _MODULE_CONFIGS)
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file not in others and not file.name.endswith(".index.json"))


def read_config(source: ModelSource) -> dict[str, Any]:
    """Return the model's config as in config.json; a GGUF file's is made from its metadata. Raises `ConfigError`."""
    if source.kind == "gguf":
        return config_from_gguf(GGUFMetadata(source.path))
    return read_json(source.config_file)


def resolve_local(model: str, version: HubVersion = _MAIN) -> ModelSource | None:
    """Return the model that `model` names if its weights are files that need no download from the hub, else None.

    Raises `ModelNotFoundError`.
    """
    path = Path(model).expanduser()
    has_weights = any(path.glob("*.safetensors")) if path.is_dir() else path.is_file() and path.suffix != ".json"
    if model in BUILTIN_MODELS or has_weights:
        return resolve(model)
    return _downloaded(model, version) if is_hub_id(model) else None


def _downloaded(repo: str, version: HubVersion) -> ModelSource | None:
    """Return a model of the hub whose weights are all in the local cache, else None."""
    try:
        source = _folder(hub_folder(repo, version, _HUB_FILES, offline=True), repo)
    except ModelNotFoundError:
        return None
    index = source.path / "model.safetensors.index.json"
    files = set(Fields(read_json(index), str(index)).object("weight_map").values()) if index.is_file() else ()
    complete = all((source.path / str(file)).is_file() for file in files)
    return source if complete and any(source.path.glob("*.safetensors")) else None


def fetch_config(model: str, version: HubVersion = _MAIN) -> tuple[dict[str, Any], ModelSource | None]:
    """Return the config of the model that `--model` names, and its small files, for callers that need no weights.

    Downloads no weights from the hub, and accepts a config.json by itself, for which it returns None instead of other
    files. Raises `ModelNotFoundError`, `ConfigError`.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_json(path), None
    if is_hub_id(model):
        source = ModelSource(hub_folder(model, version, _CONFIG_FILES, offline=False), "folder", model)
    else:
        source = resolve(model)
    return read_config(source), source


def is_hub_id(model: str) -> bool:
    """Return whether `model` is meant as the id of a hub model: nothing here has that name."""
    path = Path(model).expanduser()
    is_local = model in BUILTIN_MODELS or path.exists() or path.suffix == ".gguf"
    return not is_local and HUB_ID.fullmatch(model) is not None


def _folder(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(path, "orbax" if (path / CHECKPOINT_FILE).is_file() else "folder", name)
    files = sorted(path.glob("*.gguf"))
    hint = f"; it holds {files[0].name}: pass that file itself" if files else orbax_hint(path)
    if (path / "params.json").is_file():
        hint = (
            ". It is in Mistral's own format (params.json, consolidated.safetensors), which is not supported: get the "
            "files of the same model in Hugging Face's format (config.json, model*.safetensors). Repositories often "
            f"hold both: `hf download ORG/NAME --exclude 'consolidated*' --local-dir {path}`"
        )
    raise ModelNotFoundError(f"--model: folder {path} has no config.json, so it is no Hugging Face model folder{hint}")


def orbax_hint(path: Path) -> str:
    """Return a hint for an error message if `path` is an Orbax checkpoint but no complete folder of `jaxserve convert`.

    The hint is empty if `path` is no Orbax checkpoint.
    """
    if (path.parent / CHECKPOINT_FILE).is_file():
        return f"; it is a part of {path.parent}: pass that folder"
    inner = next((each for each in [path, *sorted(path.glob("*/"))] if _is_orbax(each)), None)
    if inner is None and not (path / CHECKPOINT_FILE).is_file():
        return ""
    return (
        f"; {inner or path} is an Orbax checkpoint, but only a whole folder of `jaxserve convert` can be served, with "
        f"its config.json and {CHECKPOINT_FILE}: copy it again, or convert the model from what this was made of"
    )


def _is_orbax(path: Path) -> bool:
    return any((path / name).is_file() for name in _ORBAX_FILES)


def _gguf(path: Path) -> ModelSource:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelNotFoundError(
                f"--model: {path} is a file but not a GGUF file; for safetensors pass the folder that holds config.json"
            )
    return ModelSource(path, "gguf", path.stem)
