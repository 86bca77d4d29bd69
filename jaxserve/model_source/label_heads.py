"""Reads heads that give logits of labels: their layers, their labels, and what makes scores of the logits.

A head is a layer of its own, or a few rows of the head of tokens, whose logits are those of tokens such as "no" and
"yes".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.architectures import ModelClass
from jaxserve.model_source.fields import WIDTH, Fields, abbreviate
from jaxserve.model_source.pooling import LabelActivation, PooledLayer, PooledTask, Pooling
from jaxserve.model_source.source import ModelSource
from jaxserve.model_source.token_ids import token_ids

TOKENS = "classifier_from_token"
"""vLLM's field with the texts of the tokens whose logits are those of labels."""
_TWO_WAY, _PLAIN = "from_2_way_softmax", "no_post_processing"
_QWEN3 = "Qwen3ForCausalLM"
_NO_YES = ("no", "yes")
# What some families do to the logits of tokens; `classifier_from_token` leaves it out, as vLLM does
_CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
_PROBLEMS: dict[str, LabelActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_FUNCTIONS: dict[str, LabelActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def of_own_layers(model: ModelClass, fields: Fields, width: int) -> PooledTask:
    """Return the task of a head with layers of its own, of a classifier or of a reward model."""
    is_reward = model.head == "reward"
    labels = _labels(fields, 1 if is_reward else 2)
    last = PooledLayer("score", width, len(labels))
    layers: tuple[PooledLayer, ...] = (last,)
    if is_reward:
        layers = (
            PooledLayer("score.0", width, width, has_bias=True, activation="relu"),
            PooledLayer("score.2", width, len(labels), has_bias=True),
        )
    activation: LabelActivation = "none" if is_reward else _activation(fields, len(labels))
    return _task(layers, labels, activation, scores_pairs=len(labels) == 1)


def of_token_texts(
    model: ModelClass, fields: Fields, width: int, source: ModelSource | None, vocab_size: int
) -> PooledTask:
    """Return the task of the head of the tokens that `classifier_from_token` names. Without a source, ids are 0, 1, …

    Raises `ConfigError` for a text that is no token.
    """
    texts, method = fields.texts(TOKENS) or [], fields.text("method", "")
    if not texts or method not in ("", _TWO_WAY, _PLAIN):
        wrong = TOKENS if not texts else "method"
        expected = "a list with the text of a token for each label" if not texts else f"{_TWO_WAY} or {_PLAIN}"
        raise fields.error(wrong, expected)
    two_way = fields.boolean("is_original_qwen3_reranker", False) or method == _TWO_WAY
    if two_way and len(texts) != 2:
        raise ConfigError(f"{fields.where}: {TOKENS} should name two tokens for one score, it names {len(texts)}")
    found = list(range(len(texts))) if source is None else token_ids(source, texts)
    ids = []
    for text, one in zip(texts, found):
        if one is None:
            raise ConfigError(
                f"{fields.where}: {TOKENS}: {abbreviate(text)} is no token of the vocabulary; write a token as "
                "tokenizer.json has it"
            )
        ids.append(one)
    if two_way:
        return of_two_tokens(model, fields, width, (ids[0], ids[1]), (texts[0], texts[1]), vocab_size)
    layer = _rows(fields, width, tuple(ids), vocab_size)
    return _task((layer,), tuple(texts), _activation(fields, len(texts)), scores_pairs=len(texts) == 1)


def of_scored_token(
    model: ModelClass, fields: Fields, width: int, tokens: tuple[int, ...], vocab_size: int
) -> PooledTask:
    """Return the task of a head whose score is the logit of a token, after the one that says the opposite, if any."""
    changed = next((name for name in _CHANGES_LOGITS if fields.get(name, 1) != 1), None)
    if changed:
        raise ConfigError(f"{fields.where}: {changed} is not supported with scores that are logits of tokens")
    if len(tokens) == 2:
        return of_two_tokens(model, fields, width, (tokens[0], tokens[1]), ("false", "true"), vocab_size)
    layer = _rows(fields, width, tokens, vocab_size)
    return _task((layer,), ("true",), _activation(fields, 1), scores_pairs=True, template=_template(model))


def of_two_tokens(
    model: ModelClass,
    fields: Fields,
    width: int,
    tokens: tuple[int, int],
    labels: tuple[str, str],
    vocab_size: int,
) -> PooledTask:
    """Return the task of a head whose score is the probability of the second of two tokens, among both."""
    layer = _rows(fields, width, tokens, vocab_size)
    return _task((layer,), labels, "softmax", scores_pairs=True, template=_template(model))


def of_reranker(
    model: ModelClass, fields: Fields, width: int, source: ModelSource | None, vocab_size: int
) -> PooledTask:
    """Return the task of a Qwen3-Reranker as published: its config is that of any Qwen3, its answers are no and yes.

    Raises `ConfigError` for another family, or a vocabulary without both tokens.
    """
    is_qwen3 = model.generative == _QWEN3
    found = (0, 1) if source is None else token_ids(source, _NO_YES) if is_qwen3 else (None, None)
    no, yes = found
    if not is_qwen3 or no is None or yes is None:
        raise ConfigError(
            f"{fields.where}: convert=classify: {model.name} has no head of labels; to make one of the logits "
            'of tokens, name them: --hf-overrides \'{"classifier_from_token": ["no", "yes"], "method": '
            f'"{_TWO_WAY}"}}\''
        )
    return of_two_tokens(model, fields, width, (no, yes), _NO_YES, vocab_size)


def _template(model: ModelClass) -> str:
    return "qwen3_reranker" if model.generative == _QWEN3 else ""


def _task(
    layers: tuple[PooledLayer, ...],
    labels: tuple[str, ...],
    activation: LabelActivation,
    *,
    scores_pairs: bool,
    template: str = "",
) -> PooledTask:
    return PooledTask(
        kind="classify",
        pooling=Pooling("last", layers),
        size=layers[-1].outputs,
        normalize=False,
        activation=activation,
        labels=labels,
        scores_pairs=scores_pairs,
        pair_template=template,
    )


def _rows(fields: Fields, width: int, tokens: tuple[int, ...], vocab_size: int) -> PooledLayer:
    """Return the layer that is these rows of the head of tokens. Raises `ConfigError` for ids that it doesn't have."""
    if max(tokens) >= vocab_size:
        raise ConfigError(f"{fields.where}: token {max(tokens)} scores, but vocab_size is {vocab_size}")
    return PooledLayer("lm_head", width, len(tokens), tokens=tokens)


def _labels(fields: Fields, default: int) -> tuple[str, ...]:
    """Return the labels of `id2label`, in the order of ids, or as many as `num_labels`. Raises `ConfigError`."""
    names: Mapping[str, Any] = fields.object("id2label")
    count = len(names) or fields.integer("num_labels", WIDTH, default)
    labels = [names.get(str(i), f"LABEL_{i}") for i in range(count)]
    if names and {str(i) for i in range(count)} != set(names):
        raise fields.error("id2label", f"an object with a label for each id from 0 to {count - 1}")
    return tuple(map(str, labels))


def _activation(fields: Fields, labels: int) -> LabelActivation:
    """Return what makes scores of logits, by default a probability of one label or among several."""
    problem = fields.text("problem_type", "")
    if problem:
        if problem not in _PROBLEMS:
            raise fields.error("problem_type", f"one of {', '.join(_PROBLEMS)}")
        return _PROBLEMS[problem]
    own = Fields(fields.object("sentence_transformers"), f"{fields.where}: sentence_transformers")
    where = own if own.get("activation_fn") else fields
    name = "activation_fn" if where is own else "sbert_ce_default_activation_function"
    function = where.text(name, "")
    if not function:
        return "sigmoid" if labels == 1 else "softmax"
    found = _FUNCTIONS.get(function.rpartition(".")[2]) if function.startswith("torch.nn.modules.") else None
    if found is None:
        raise where.error(name, f"one of torch.nn.modules' {', '.join(_FUNCTIONS)}")
    return found
