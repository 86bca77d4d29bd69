"""Reads the options that a model's makers recommend for sampling: generation_config.json, or a GGUF's metadata."""

from __future__ import annotations

from typing import Any

from jaxserve.model_source.fields import read_json
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.model_source.source import ModelSource

GENERATION_CONFIG = "generation_config.json"
# What llama.cpp's converter makes of the fields of that file
_GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def read_generation_config(source: ModelSource) -> tuple[dict[str, Any], str]:
    """Return the fields of generation_config.json and where they are from; {} if the model has none.

    Of a GGUF file, it is the file beside it, or else its metadata. Raises `ConfigError`.
    """
    folder = source.path.parent if source.kind == "gguf" else source.path
    file = folder / GENERATION_CONFIG
    if file.is_file():
        return read_json(file), str(file)
    if source.kind != "gguf":
        return {}, str(file)
    metadata = GGUFMetadata(source.path)
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_KEYS.items()}
    return {name: _shortest(value) for name, value in found.items() if value is not None}, str(source.path)


def _shortest(value: Any) -> Any:
    # A float32 becomes the decimal number that was meant: 0.6 and not 0.60000002
    return float(f"{value:.7g}") if isinstance(value, float) else value
