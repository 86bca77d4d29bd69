"""A serving engine for large language models on JAX. Public names are imported on first use: importing it is fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.api_types import SamplingParams, StructuredOutputs
    from jaxserve.config.schema import EngineConfig
    from jaxserve.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "SamplingParams", "StructuredOutputs", "__version__"]

_MODULES = {
    "LLM": "jaxserve.llm",
    "SamplingParams": "jaxserve.api_types",
    "StructuredOutputs": "jaxserve.api_types",
    "EngineConfig": "jaxserve.config.schema",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
