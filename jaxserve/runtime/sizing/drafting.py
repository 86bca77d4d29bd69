"""How a deployment makes drafts: by looking up n-grams, or with a draft model, whose own sizes it checks."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxserve import model_source
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family, parse_model_config
from jaxserve.quant import OnTheFly, Shards, WeightChoice, choose_weights, hold_weights, method_of, stored_by_config
from jaxserve.runtime.speculation.draft_model import DraftModel
from jaxserve.runtime.speculation.ngram import NgramLookup
from jaxserve.weights import stored_types
from pallas_kernels.paged_attention import KernelTarget

# Draft tokens of a step by default: looking one up costs nothing.
_DEFAULT_DRAFTS = {"ngram": 7}
_DEFAULT_DRAFTS_OF_A_MODEL = 4


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How drafts are made; with a draft model, its parameters and how they are held."""

    drafter: NgramLookup | DraftModel
    dtype: np.dtype
    params: Any = None
    weights: WeightChoice = dataclasses.field(default_factory=WeightChoice)

    @property
    def model(self) -> ModelConfig | None:
        """The config of the draft model, if there is one."""
        return self.drafter.model if isinstance(self.drafter, DraftModel) else None

    @property
    def dense(self) -> Any:
        """The parameters of the draft model as if none were quantized."""
        return None if self.model is None else family(self.model).abstract(self.model, self.dtype)


def max_drafts(config: EngineConfig) -> int:
    """Return the most draft tokens of a step, 0 without speculation."""
    if config.speculative_method == "none":
        return 0
    default = _DEFAULT_DRAFTS.get(config.speculative_method, _DEFAULT_DRAFTS_OF_A_MODEL)
    return config.num_speculative_tokens or default


def plan_drafting(
    config: EngineConfig, model: ModelConfig, context: int, dtype: np.dtype, target: KernelTarget, shards: Shards
) -> Drafting | None:
    """Return how a deployment of `model` drafts, or None without speculation.

    Raises `ConfigError` for a draft model that doesn't fit the model or its devices.
    """
    count = max_drafts(config)
    if not count:
        return None
    if config.speculative_model is None:
        return Drafting(NgramLookup(count, config.prompt_lookup_max, config.prompt_lookup_min), dtype)
    try:
        draft, stored = _read_model(config.speculative_model, config.load_format)
    except ConfigError as error:
        raise ConfigError(f"speculative_model={config.speculative_model}: {error}") from error
    _check(config.speculative_model, draft, config.model, model, shards.tensor)
    draft = dataclasses.replace(
        draft.with_context(min(context, draft.longest_context)), shards=shards.tensor, whole_from=0
    )
    if len(draft.kv_specs()) > 1:
        raise ConfigError(
            f"speculative_model={config.speculative_model}: its layers have KV heads of different number or size, and "
            "a draft model's must be the same"
        )
    params = family(draft).abstract(draft, dtype)
    stored = stored or stored_by_config(draft.quantization, params)
    setting = config.quantization
    weights = choose_weights(
        setting if draft.quantization is None and setting in get_args(OnTheFly) else "auto",
        params,
        stored,
        method_of(draft.quantization, stored),
        target=target,
        dtype=dtype,
        shards=shards,
        splits_into=draft.splits_into,
    )
    return Drafting(DraftModel(draft, count), dtype, hold_weights(params, weights.forms), weights)


@functools.lru_cache(maxsize=4)
def _read_model(name: str, load_format: Any) -> tuple[ModelConfig, Any]:
    """Read the config of a draft model, and how its tensors are stored if its files are here."""
    draft = parse_model_config(model_source.fetch_config(name), f"config of {name}")
    source = model_source.resolve_local(name)
    return draft, None if source is None else stored_types(source, draft, load_format)


def _check(name: str, draft: ModelConfig, model_name: str, model: ModelConfig, tensor: int) -> None:
    where = f"speculative_model={name}"
    if draft.num_experts:
        raise ConfigError(f"{where} is a mixture of experts, which can't draft yet; take a dense model")
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{where} has a vocabulary of {draft.vocab_size} tokens and the model one of {model.vocab_size}; a draft "
            "model must have the model's vocabulary"
        )
    if not draft.splits_into(tensor):
        raise ConfigError(
            f"{where} can't be split over tp_size={tensor}: it has {draft.num_heads} attention heads and "
            f"{draft.num_kv_heads} KV heads"
        )
    own, other = (_vocabulary(one) for one in (name, model_name))
    for token, number in own.items() if other else ():
        if other.get(token, number) != number:
            raise ConfigError(
                f"{where} has another vocabulary: token {number} is {token!r} there, and {other[token]} has that text "
                "in the model; a draft model must have the model's vocabulary"
            )


@functools.lru_cache(maxsize=4)
def _vocabulary(name: str) -> dict[str, int]:
    """Return the tokens of a model's tokenizer.json without the added ones; {} if there is no such list."""
    source = model_source.resolve_local(name)
    path = (Path(name) if source is None else source.path) / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
