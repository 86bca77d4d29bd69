"""Checks the settings of speculative decoding that need no model."""

from __future__ import annotations

from jaxserve.errors import ConfigError

HEADS = ("eagle", "eagle3", "mtp")
"""The methods that draft from the model's hidden states."""

_WITH_A_MODEL = ("draft", "eagle", "eagle3")
_LOOKUP = (4, 2)  # prompt_lookup_max and prompt_lookup_min, if they are not set


def check_speculation(
    *,
    method: str,
    runner: str,
    model: str | None,
    num_tokens: int | None,
    disable_by_batch_size: int | None,
    lookup_max: int,
    lookup_min: int,
) -> None:
    """Raise `ConfigError` if a setting is for another method, if the method lacks one, or if nothing is generated."""
    if method != "none" and runner == "pooling":
        raise ConfigError(f"speculative_method={method} drafts tokens, and runner=pooling generates none; keep one")
    if method == "none":
        if model is not None:
            raise ConfigError(f"speculative_model={model} needs speculative_method: draft, eagle or eagle3")
        given = {"num_speculative_tokens": num_tokens, "speculative_disable_by_batch_size": disable_by_batch_size}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name}={value} needs a method that drafts: set speculative_method, e.g. to ngram")
    if method in _WITH_A_MODEL and model is None:
        what = (
            "smaller model that drafts"
            if method == "draft"
            else "head that drafts. To draft with a layer of the model's own checkpoint, set speculative_method to mtp"
        )
        raise ConfigError(f"speculative_method={method} needs speculative_model: the {what}")
    if method not in _WITH_A_MODEL and model is not None:
        raise ConfigError(f"speculative_method={method} drafts without speculative_model={model}; leave it out")
    if method != "ngram" and (lookup_max, lookup_min) != _LOOKUP:
        raise ConfigError("prompt_lookup_max and prompt_lookup_min need speculative_method=ngram")
    if lookup_min > lookup_max:
        raise ConfigError(
            f"prompt_lookup_min={lookup_min} must be at most prompt_lookup_max={lookup_max}; set both if one is set"
        )
