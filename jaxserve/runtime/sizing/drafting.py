"""Plans how a deployment makes drafts: by looking up n-grams, or by a draft model or a head, whose sizes it checks."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np

from jaxserve import model_source
from jaxserve.config.model_files import draft_version, model_version
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.model_source import HubVersion
from jaxserve.model_source.fields import Fields
from jaxserve.models.config import ModelConfig
from jaxserve.models.draft_heads import eagle, mtp
from jaxserve.models.layout import AnyModel, LaidOutModel
from jaxserve.models.registry import abstract_params, parse_draft_head, parse_model_config
from jaxserve.quant import (
    OnTheFly,
    Shards,
    Stored,
    WeightChoice,
    choose_weights,
    hold_weights,
    method_of,
    stored_by_config,
)
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.weights import open_source, stored_types
from pallas_kernels.ngram_lookup import NgramLookup
from pallas_kernels.paged_attention import KernelTarget

# Draft tokens of a step by default: looking one up costs nothing.
_DEFAULT_DRAFTS = {"ngram": 7}
_DEFAULT_DRAFTS_OF_A_MODEL = 4


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The way drafts are made; with a draft model, also its parameters and how they are held."""

    drafter: NgramLookup | DraftModel
    dtype: np.dtype
    params: Any = None
    weights: WeightChoice = dataclasses.field(default_factory=WeightChoice)

    @property
    def model(self) -> AnyModel | None:
        """The draft model, if there is one."""
        return self.drafter.model if isinstance(self.drafter, DraftModel) else None

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the model whose inputs a head needs."""
        head = None if self.model is None else self.model.config
        return head.taps if isinstance(head, eagle.Config) else ()

    @property
    def needs_embedding(self) -> bool:
        """Whether it needs the embedding of the model, as a head does."""
        return isinstance(self.drafter, DraftModel) and self.drafter.is_head

    @property
    def dense(self) -> Any:
        """The parameters of the draft model as if none were quantized."""
        return None if self.model is None else abstract_params(self.model, self.dtype)


def max_drafts(config: EngineConfig) -> int:
    """Return the most draft tokens of a step, 0 without speculation."""
    if config.speculative_method == "none":
        return 0
    default = _DEFAULT_DRAFTS.get(config.speculative_method, _DEFAULT_DRAFTS_OF_A_MODEL)
    return config.num_speculative_tokens or default


def plan_drafting(
    config: EngineConfig,
    model: AnyModel,
    dtype: np.dtype,
    target: KernelTarget,
    shards: Shards,
    stored: Stored,
) -> Drafting | None:
    """Return how a deployment of `model` drafts, or None without speculation. `stored` are the model's own tensors.

    Raises `ConfigError` for a draft model that doesn't fit the model or its devices.
    """
    count = max_drafts(config)
    if not count:
        return None
    if config.speculative_method == "ngram":
        return Drafting(NgramLookup(count, config.prompt_lookup_max, config.prompt_lookup_min), dtype)
    if config.speculative_method == "mtp":
        draft: AnyModel = dataclasses.replace(model, config=mtp.config_of(model.config))
    else:
        read, stored = _read_draft(config, model.config, model.shards)
        context = min(model.context, read.longest_context)
        draft = LaidOutModel(read, shards=model.shards, context=context, whole_from=0)
    if len(draft.kv_specs()) > 1:
        raise ConfigError(
            f"speculative_model={config.speculative_model}: its layers have KV heads of different number or size, and "
            "a draft model's must be the same"
        )
    if draft.state_spec() is not None and config.speculative_method != "mtp":
        raise ConfigError(
            f"speculative_model={config.speculative_model}: some of its layers keep a state for each sequence, and a "
            "draft model's may not"
        )
    params, quantization = abstract_params(draft, dtype), draft.config.quantization
    stored = stored or stored_by_config(quantization, params)
    setting = config.quantization
    weights = choose_weights(
        setting if quantization is None and setting in get_args(OnTheFly) else "auto",
        params,
        stored,
        method_of(quantization, stored),
        target=target,
        dtype=dtype,
        shards=shards,
        splits_into=draft.config.splits_into,
    )
    return Drafting(DraftModel(draft, count), dtype, hold_weights(params, weights.forms), weights)


def _read_draft(config: EngineConfig, model: ModelConfig, tensor: int) -> tuple[ModelConfig, Stored]:
    """Read the config of a draft model or a head, and how its tensors are stored if its files are here."""
    name = config.speculative_model
    assert name is not None
    where = f"speculative_model={name}"
    try:
        draft, stored = _read_model(name, draft_version(config), config.speculative_method, config.load_format)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
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
    if isinstance(draft, eagle.Config):
        return _fitted_head(where, draft, model), stored
    _check_model(where, draft, config)
    return draft, stored


def _fitted_head(where: str, head: eagle.Config, model: ModelConfig) -> eagle.Config:
    """Return the config of a head with the layers of the model whose inputs it gets. Raises `ConfigError`."""
    if head.target_size != model.hidden_size or (
        head.architecture == eagle.EAGLE and head.hidden_size != model.hidden_size
    ):
        raise ConfigError(
            f"{where} is a head for a model with hidden states of {head.target_size} numbers, those of this model "
            f"({model.architecture}) have {model.hidden_size}; take the head that was trained for it"
        )
    if head.architecture == eagle.EAGLE:
        return head
    layers = model.num_layers
    taps = head.taps or tuple(sorted({2, layers // 2, layers - 3}))
    if len(taps) != 3 or taps[-1] >= layers or taps[0] < 0:
        raise ConfigError(
            f"{where} needs the inputs of layers {', '.join(map(str, taps))} of the model, which has {layers} layers; "
            "take the head that was trained for it"
        )
    return dataclasses.replace(head, taps=taps)


@functools.lru_cache(maxsize=4)
def _read_model(name: str, version: HubVersion, method: str, load_format: Any) -> tuple[ModelConfig, Any]:
    (raw, _), where = model_source.fetch_config(name, version), f"config of {name}"
    source = model_source.resolve_local(name, version)
    if method == "draft":
        if head := eagle.method_of(Fields(raw, where)):
            raise ConfigError(f"{where}: it is a head that drafts, no model; set speculative_method to {head}")
        draft = parse_model_config(raw, where)
    else:
        here = source is not None and load_format != "dummy"
        draft = parse_draft_head(raw, where, method, open_source(source).infos if here else ())  # type: ignore[arg-type]
    return draft, {} if source is None else stored_types(source, draft, load_format)


def _check_model(where: str, draft: ModelConfig, config: EngineConfig) -> None:
    """Raise `ConfigError` unless a model can draft for the one that is served."""
    if draft.num_experts:
        raise ConfigError(f"{where} is a mixture of experts, which can't draft yet; take a dense model")
    assert config.speculative_model is not None
    own = _vocabulary(config.speculative_model, draft_version(config))
    other = _vocabulary(config.model, model_version(config))
    for token, number in own.items() if other else ():
        if other.get(token, number) != number:
            raise ConfigError(
                f"{where} has another vocabulary: token {number} is {token!r} there, and {other[token]} has that text "
                "in the model; a draft model must have the model's vocabulary"
            )


@functools.lru_cache(maxsize=4)
def _vocabulary(name: str, version: HubVersion) -> dict[str, int]:
    """Return the tokens of a model's tokenizer.json without the added ones; {} if there is no such list."""
    source = model_source.resolve_local(name, version)
    path = (Path(name) if source is None else source.path) / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
