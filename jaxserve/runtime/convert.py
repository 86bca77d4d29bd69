"""What `jaxserve convert` does with a model's config and weights; it needs no device, and no more memory than two
parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax

import jaxserve
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource, read_config
from jaxserve.models.config import parse_model_config
from jaxserve.models.registry import family
from jaxserve.runtime.programs.builder import dtype_of
from jaxserve.weights import open_weights
from jaxserve.weights.arrays import flatten
from jaxserve.weights.manifest import write_manifest
from jaxserve.weights.orbax_write import write_checkpoint

Progress = Callable[[int, int], None]


def convert(source: ModelSource, config: EngineConfig, folder: Path, progress: Progress) -> None:
    """Write config.json, the weights as `--dtype` has them, and last what tells that they are whole, into `folder`.

    `progress` is told, after each parameter, its bytes and those of all. Raises `ConfigError` for what can't be read or
    written.
    """
    # Orbax asks jax which process this is, and jax would take hold of an accelerator for that
    jax.config.update("jax_platforms", "cpu")
    raw = read_config(source)
    model = parse_model_config(raw, str(source.config_file))
    abstract = family(model).abstract(model, dtype_of(config.dtype))
    reader = open_weights(source, model, abstract, load_format=config.load_format, seed=config.random_seed)
    total = sum(spec.nbytes for _, spec in flatten(abstract)[0])
    try:
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        parameters = write_checkpoint(folder, abstract, reader, lambda nbytes: progress(nbytes, total))
        write_manifest(folder, version=jaxserve.__version__, model=source.name, parameters=parameters)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # TensorStore's errors are bare ValueErrors
        raise ConfigError(f"the checkpoint can't be made in {folder.parent}: {error}") from error
