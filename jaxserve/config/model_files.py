"""Finds the files of a configuration: of its model, its tokenizer, and the model that drafts.

All that need files of the served model get them here, so that `revision`, `tokenizer_path`, `download_dir` and
`hf_token` hold everywhere.
"""

from __future__ import annotations

from typing import Any

from jaxserve import model_source
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.model_source import HubVersion, ModelSource


def fetch_files(config: EngineConfig) -> ModelSource:
    """Download all files of a configuration that aren't on this machine, and return those of the model.

    Raises `ModelNotFoundError`, `ConfigError`.
    """
    source = model_files(config)
    if has_other_tokenizer(config):
        tokenizer_files(config)
    if config.speculative_model is not None:
        draft_files(config)
    return source


def model_files(config: EngineConfig) -> ModelSource:
    """Return the files of the model, downloaded if need be. Raises `ModelNotFoundError`, `ConfigError`."""
    return model_source.resolve(config.model, model_version(config))


def local_model_files(config: EngineConfig) -> ModelSource | None:
    """Return the files of the model if its weights are on this machine, else None. Raises as `model_files` does."""
    return model_source.resolve_local(config.model, model_version(config))


def fetch_model_config(config: EngineConfig) -> tuple[dict[str, Any], ModelSource | None]:
    """Return the config of the model and its small files, without weights; see `model_source.fetch_config`."""
    return model_source.fetch_config(config.model, model_version(config))


def draft_files(config: EngineConfig) -> ModelSource:
    """Return the files of `speculative_model`, which must be set. Raises as `model_files` does."""
    assert config.speculative_model is not None
    return model_source.resolve(config.speculative_model, draft_version(config))


def tokenizer_files(config: EngineConfig) -> ModelSource:
    """Return the files of the tokenizer, which are those of the model unless others are named.

    Raises `ConfigError` naming the setting, or as `model_files` does.
    """
    if not has_other_tokenizer(config):
        return model_files(config)
    path, revision = _tokenizer_version(config)
    name = "revision" if config.tokenizer_revision is None else "tokenizer_revision"
    version = _version(config, path, name, revision)
    try:
        return model_source.resolve_tokenizer(path, version)
    except JaxserveError as error:
        raise ConfigError(f"tokenizer_path={path}: {str(error).removeprefix('--model: ')}") from error


def has_other_tokenizer(config: EngineConfig) -> bool:
    """Return whether the tokenizer comes from other files than the model."""
    return _tokenizer_version(config) != (config.model, config.revision)


def model_version(config: EngineConfig) -> HubVersion:
    """Return the version of the model. Raises `ConfigError` for a revision of a model that isn't the hub's."""
    return _version(config, config.model, "revision", config.revision)


def draft_version(config: EngineConfig) -> HubVersion:
    """Return the version of `speculative_model`: another repository doesn't have the model's revisions."""
    same = config.speculative_model == config.model
    return HubVersion(config.revision if same else None, config.download_dir, config.hf_token)


def _tokenizer_version(config: EngineConfig) -> tuple[str, str | None]:
    path = config.model if config.tokenizer_path is None else config.tokenizer_path
    revision = config.revision if path == config.model else None
    return path, revision if config.tokenizer_revision is None else config.tokenizer_revision


def _version(config: EngineConfig, model: str, name: str, revision: str | None) -> HubVersion:
    if revision is not None and not model_source.is_hub_id(model):
        raise ConfigError(
            f"{name}={revision} chooses a version of a model on the hub (org/name), and {model} is a built-in model or "
            f"a path; leave {name} out"
        )
    return HubVersion(revision, config.download_dir, config.hf_token)
