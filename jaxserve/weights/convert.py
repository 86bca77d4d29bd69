"""Writes a model's config and weights as an Orbax checkpoint: the work of `jaxserve convert`.

It needs no device. Only the parameters that are being read or written are in memory (see `orbax_write`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, get_args

import jax

import jaxserve
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import read_served_checkpoint
from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.models.dtypes import dtype_of
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from jaxserve.params import Path
from jaxserve.quant import CONVERTED, OnTheFly, WeightForm, convert_forms, hold_weights, method_of
from jaxserve.weights import has_kv_scales, open_weights, stored_types
from jaxserve.weights.arrays import flatten
from jaxserve.weights.manifest import write_manifest
from jaxserve.weights.orbax_write import write_checkpoint

logger = logging.getLogger("jaxserve.weights")

Progress = Callable[[int, int], None]


def convert(source: ModelSource, config: EngineConfig, folder: FilePath, progress: Progress) -> None:
    """Write config.json, the weights in `--dtype`, and last the manifest that marks them as complete, into `folder`.

    With `--quantization`, linear layers are quantized; weights that the checkpoint has quantized are dequantized.
    Calls `progress` after each parameter, with its bytes and the bytes of all parameters. Raises `ConfigError` if the
    model can't be read or the folder can't be written.
    """
    # Orbax asks jax which process this is, and jax would acquire an accelerator for that
    jax.config.update("jax_platforms", "cpu")
    served = read_served_checkpoint(config, source)
    raw, model = served.raw, parse_model_config(served.raw, served.where, served.task)
    dense = abstract_params(LaidOutModel(model), dtype_of(config.dtype))
    quantization = model.quantization
    raw = {name: value for name, value in raw.items() if name not in ("quantization_config", "compression_config")}
    forms: dict[Path, WeightForm] = {}
    if config.quantization not in ("auto", "none"):
        if config.quantization not in get_args(OnTheFly):
            raise ConfigError(
                f"quantization={config.quantization}: a folder is written in {', '.join(get_args(OnTheFly))}, or in "
                "16 or 32 bits without it"
            )
        if method := method_of(quantization, stored_types(source, model, config.load_format)):
            raise ConfigError(
                f"quantization={config.quantization}: the checkpoint is quantized by {method}; leave it out, and "
                "weights are dequantized"
            )
        forms = convert_forms(config.quantization, dense)
        raw["quantization_config"] = {"quant_method": CONVERTED, "scheme": config.quantization}
    abstract = hold_weights(dense, forms)
    options: dict[str, Any] = {"load_format": config.load_format, "seed": config.random_seed}
    reader = open_weights(source, abstract, dense=dense, quantization=quantization, on_the_fly=bool(forms), **options)
    if config.load_format != "dummy" and has_kv_scales(source):
        logger.warning("the scales of an fp8 KV cache are not kept; --calculate-kv-scales makes them anew")
    total = sum(math.prod(spec.stored_shape) * spec.dtype.itemsize for _, spec in flatten(abstract)[0])
    try:
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        parameters = write_checkpoint(folder, abstract, reader, lambda nbytes: progress(nbytes, total))
        write_manifest(folder, version=jaxserve.__version__, model=source.name, parameters=parameters)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # TensorStore's errors are bare ValueErrors
        raise ConfigError(f"the checkpoint can't be written in {folder.parent}: {error}") from error
