"""Reads the settings that other engines write in forms of their own.

These are vLLM's mappings `--speculative-config`, `--structured-outputs-config` and `--pooler-config`, which have
several settings in them, its older `--task`, and SGLang's count of draft tokens.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from jaxserve.config.mappings import read_mapping
from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError

# The keys that mean a setting of ours, or another flag of vLLM's.
_SETTINGS: Mapping[str, str] = types.MappingProxyType(
    {
        "method": "speculative_method",
        "model": "speculative_model",
        "num_speculative_tokens": "num_speculative_tokens",
        "prompt_lookup_max": "prompt_lookup_max",
        "prompt_lookup_min": "prompt_lookup_min",
        "disable_by_batch_size": "speculative_disable_by_batch_size",
        "draft_tensor_parallel_size": "speculative_draft_tensor_parallel_size",
        "acceptance_method": "spec_decoding_acceptance_method",
        "rejection_sample_method": "spec_decoding_acceptance_method",
        "disable_logprobs": "disable_logprobs_during_spec_decoding",
        "disable_mqa_scorer": "speculative_disable_mqa_scorer",
        "posterior_threshold": "typical_acceptance_sampler_posterior_threshold",
        "posterior_alpha": "typical_acceptance_sampler_posterior_alpha",
    }
)
_FOR_BOTH = "the setting of the same name applies to the model and to the draft model; leave it out"
_AS_MEASURED = "measured times and acceptance decide how many tokens are drafted; leave it out"
_FIXED = "each method has one way of drafting tokens; leave it out"
_SUFFIX = "suffix decoding is not supported; method ngram drafts from the request's own tokens"
_SYNTHETIC = "only tokens that the model draws too are accepted, so that answers never change; leave it out"
_REFUSED: Mapping[str, str] = types.MappingProxyType(
    {
        "tensor_parallel_size": "write --tensor-parallel-size; the draft model runs on the same devices",
        "max_model_len": "drafts have the context length of the model; leave it out",
        "revision": "give the folder of the revision as model",
        "code_revision": "code that comes with a checkpoint is never run; leave it out",
        "speculative_token_tree": "drafts are chains, not trees; leave it out",
        "use_heterogeneous_vocab": "a draft model must have the vocabulary of the model",
        "num_speculative_tokens_per_batch_size": _AS_MEASURED,
        "enable_adaptive_verification": _AS_MEASURED,
        "synthetic_acceptance_rates": _SYNTHETIC,
        "synthetic_acceptance_length": _SYNTHETIC,
        "synthetic_acceptance_rate": _SYNTHETIC,
    }
    | dict.fromkeys(
        ("enforce_eager", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "draft_load_config"),
        _FOR_BOTH,
    )
    | dict.fromkeys(
        ("disable_padded_drafter_batch", "use_local_argmax_reduction", "parallel_drafting", "draft_sample_method"),
        _FIXED,
    )
    | dict.fromkeys(("dspark_draft_topk",), "DSpark is not supported")
    | dict.fromkeys(
        (
            "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        _SUFFIX,
    )
)  # fmt: skip


_IN_REQUESTS = "a request asks for it, in its own `structured_outputs`; leave it out"
_OF_GRAMMARS: Mapping[str, str] = types.MappingProxyType(
    {
        "disable_fallback": "there is one backend, and nothing falls back to it; leave it out",
        "enable_in_reasoning": "a form of the answer begins after the reasoning; leave it out",
    }
    | dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), _IN_REQUESTS)
)


_METHODS: Mapping[str, str] = types.MappingProxyType({"LAST": "last", "MEAN": "mean", "CLS": "cls", "ALL": "all"})
_BY_REQUEST = "a request says what is made of its numbers; leave it out"
_OF_POOLERS: Mapping[str, str] = types.MappingProxyType(
    dict.fromkeys(("normalize", "softmax", "activation", "use_activation", "dimensions"), _BY_REQUEST)
    | dict.fromkeys(("tok_pooling_type", "step_tag_id", "returned_token_ids"), "a text has one vector, not one a token")
    | dict.fromkeys(
        ("enable_chunked_processing", "max_embed_len"), "a longer text is an error, or cut where its request says so"
    )
    | dict.fromkeys(("logit_mean", "logit_sigma", "logit_bias"), "logits are not calibrated; leave it out")
    | {
        "task": "write --convert embed or classify",
        "enable_flash_late_interaction": "a text has one vector, not one a token",
    }
)
_TASKS: Mapping[str, Mapping[str, object]] = types.MappingProxyType(
    {
        "auto": {},
        "generate": {"runner": "generate"},
        "embed": {"runner": "pooling", "convert": "embed"},
        "embedding": {"runner": "pooling", "convert": "embed"},
        "classify": {"runner": "pooling", "convert": "classify"},
        "score": {"runner": "pooling"},
        "reward": {"runner": "pooling"},
    }
)
"""Scores and rewards are made of vectors or of labels, whichever the checkpoint is for."""


def read_speculative_config(value: object, place: str) -> dict[str, object]:
    """Return the settings in vLLM's `speculative_config`, by our names or those of its flags. Raises `ConfigError`."""
    return _read(value, place, _SETTINGS, _REFUSED, '{"method": "ngram", "num_speculative_tokens": 5}')


def read_structured_outputs_config(value: object, place: str) -> dict[str, object]:
    """Return the settings in vLLM's `structured_outputs_config`, by the names of its flags. Raises `ConfigError`."""
    settings = {"backend": "guided_decoding_backend", "reasoning_parser": "reasoning_parser"}
    return _read(value, place, settings, _OF_GRAMMARS, '{"backend": "auto"}')


def read_pooler_config(value: object, place: str) -> dict[str, object]:
    """Return the setting in vLLM's `pooler_config`: how vectors are pooled. Raises `ConfigError`."""
    settings = {"pooling_type": "pooling", "seq_pooling_type": "pooling"}
    found = _read(value, place, settings, _OF_POOLERS, '{"seq_pooling_type": "MEAN"}')
    if not found:
        return {}
    method = _METHODS.get(str(found["pooling"]).upper())
    if method is None:
        raise ConfigError(f"{place}: pooling_type={found['pooling']} is not supported; {', '.join(_METHODS)} are")
    return {"pooling": method}


def read_task(value: object, place: str) -> dict[str, object]:
    """Return the settings for vLLM's older `--task`. Raises `ConfigError`."""
    if value not in _TASKS:
        raise ConfigError(f"{place} must be one of {', '.join(_TASKS)}, got {value!r}")
    return dict(_TASKS[str(value)])


def _read(
    value: object, place: str, settings: Mapping[str, str], refused: Mapping[str, str], example: str
) -> dict[str, object]:
    """Return the settings in a mapping or its JSON.

    Keys whose value is null are left out, as are unsupported keys whose value is false. Raises `ConfigError`.
    """
    found: dict[str, object] = {}
    for key, given in read_mapping(value, place, example).items():
        if given is None:
            continue
        if key in settings:
            found[settings[key]] = given
        elif key not in refused:
            raise ConfigError(f"{place}: {key} is not a known key{nearest(str(key), {*settings, *refused})}")
        elif given is not False:
            raise ConfigError(f"{place}: {key}={given} is refused: {refused[key]}")
    return found


def read_num_draft_tokens(value: object, place: str) -> dict[str, object]:
    """Return the setting for SGLang's `--speculative-num-draft-tokens`, which also counts the token before the drafts.

    Raises `ConfigError`.
    """
    try:
        tokens = int(str(value))
    except ValueError:
        raise ConfigError(f"{place} must be a whole number, got {value!r}") from None
    if tokens < 2:
        raise ConfigError(f"{place} counts the token before the drafts too: it must be at least 2, got {tokens}")
    return {"num_speculative_tokens": tokens - 1}
