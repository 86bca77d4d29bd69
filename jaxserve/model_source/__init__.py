"""From what a person writes after `--model` to files on this machine, and to the model's config.

`resolve` finds or fetches the files, `read_config` gives the Hugging Face style config of either kind, `pull` fetches a
built-in model. Never opens weights or tokenizers, never imports jax.
"""

from jaxserve.model_source.builtin import BUILTIN_MODELS, home, pull
from jaxserve.model_source.source import (
    CHECKPOINT,
    ModelSource,
    config_of,
    gguf_of,
    orbax_hint,
    read_config,
    resolve,
    tokenizer_files,
    tokenizer_source,
)

__all__ = [
    "BUILTIN_MODELS",
    "CHECKPOINT",
    "ModelSource",
    "config_of",
    "gguf_of",
    "home",
    "orbax_hint",
    "pull",
    "read_config",
    "resolve",
    "tokenizer_files",
    "tokenizer_source",
]
