"""Loads the tokenizer that a configuration names."""

from __future__ import annotations

from jaxserve.config.model_files import has_other_tokenizer, model_files, tokenizer_files
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import read_served_checkpoint
from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer


def load_served_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer of the model, or the one that `tokenizer_path` names.

    Raises `ConfigError` if there is none, or if it makes ids that the model doesn't have.
    """
    model = model_files(config)
    if not has_other_tokenizer(config):
        return load_tokenizer(model)
    tokenizer = load_tokenizer(tokenizer_files(config), model)
    size = read_served_checkpoint(config, model).vocab_size
    if size is not None and tokenizer.largest_id >= size:
        raise ConfigError(
            f"tokenizer_path={config.tokenizer_path or config.model} makes ids up to {tokenizer.largest_id}, and the "
            f"vocabulary of {config.model} ends at {size - 1}; name a tokenizer that was made for this model"
        )
    return tokenizer
