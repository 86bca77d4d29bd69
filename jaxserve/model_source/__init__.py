"""Finds the files of the model that `--model` names, and reads its config.

`resolve` finds or downloads the files, `read_config` returns the config in Hugging Face's form for every kind of file,
`pull` downloads a built-in model. Never opens weights or tokenizers, never imports jax.
"""

from jaxserve.model_source.builtin import jaxserve_home, pull
from jaxserve.model_source.builtin_models import BUILTIN_MODELS
from jaxserve.model_source.hub import HubVersion
from jaxserve.model_source.source import (
    CHECKPOINT_FILE,
    ModelSource,
    fetch_config,
    find_tokenizer_files,
    is_hub_id,
    orbax_hint,
    read_config,
    resolve,
    resolve_local,
    resolve_tokenizer,
)

__all__ = [
    "BUILTIN_MODELS",
    "CHECKPOINT_FILE",
    "HubVersion",
    "ModelSource",
    "fetch_config",
    "find_tokenizer_files",
    "is_hub_id",
    "jaxserve_home",
    "orbax_hint",
    "pull",
    "read_config",
    "resolve",
    "resolve_local",
    "resolve_tokenizer",
]
