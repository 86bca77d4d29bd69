"""Reads heads that give logits of labels: their layers, their labels, and what makes scores of the logits.

A head is a layer of its own, or a few rows of the head of tokens, whose logits are those of tokens such as "no" and
"yes".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.model_source.architectures import ModelClass
from jaxserve.model_source.encoder_heads import encoder_head
from jaxserve.model_source.fields import WIDTH, Fields, abbreviate
from jaxserve.model_source.pooling import LabelActivation, PooledLayer, PooledTask, Pooling
from jaxserve.model_source.sentence_modules import sentence_fields
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


@dataclasses.dataclass(frozen=True)
class LabelHeads:
    """The heads that a checkpoint may have; `fields` are those of its config. Without a `source`, only that is here.

    `tokenizer` has the ids of tokens; it is most often the `source`.
    """

    model: ModelClass
    fields: Fields
    source: ModelSource | None
    tokenizer: ModelSource | None

    def of_own_layers(self) -> PooledTask:
        """Return the task of a head with layers of its own, of a classifier or of a reward model."""
        is_reward, width = self.model.head == "reward", self._width
        labels = _labels(self.fields, 1 if is_reward else 2)
        if self.model.is_encoder:
            return self.of_encoder(encoder_head(self.model, self.fields, width, len(labels)), labels)
        if is_reward:
            first = PooledLayer("score.0", width, width, has_bias=True, activation="relu")
            last = PooledLayer("score.2", width, len(labels), has_bias=True)
            return _task((first, last), labels, "none", scores_pairs=len(labels) == 1)
        layer = PooledLayer("score", width, len(labels))
        return _task((layer,), labels, self._activation(len(labels)), scores_pairs=len(labels) == 1)

    def of_encoder(self, pooling: Pooling, labels: Sequence[Any] | None) -> PooledTask:
        """Return the task of an encoder's head; its labels have numbers for names if none are given."""
        count = pooling.layers[-1].outputs
        names = tuple(map(str, labels)) if labels else tuple(f"LABEL_{i}" for i in range(count))
        found = _task(pooling.layers, names, self._activation(count), scores_pairs=count == 1)
        return dataclasses.replace(found, pooling=pooling)

    def of_token_texts(self) -> PooledTask:
        """Return the task of the tokens that `classifier_from_token` names. Without a tokenizer, their ids are 0, 1, …

        Raises `ConfigError` for a text that is no token.
        """
        fields = self.fields
        texts, method = fields.texts(TOKENS) or [], fields.text("method", "")
        if not texts:
            raise fields.error(TOKENS, "a list with the text of a token for each label")
        if method not in ("", _TWO_WAY, _PLAIN):
            raise fields.error("method", f"{_TWO_WAY} or {_PLAIN}")
        two_way = fields.boolean("is_original_qwen3_reranker", False) or method == _TWO_WAY
        if two_way and len(texts) != 2:
            raise ConfigError(f"{fields.where}: {TOKENS} should name two tokens for one score, it names {len(texts)}")
        ids = []
        for text, one in zip(texts, range(len(texts)) if self.tokenizer is None else token_ids(self.tokenizer, texts)):
            if one is None:
                raise ConfigError(
                    f"{fields.where}: {TOKENS}: {abbreviate(text)} is no token of the vocabulary; write a token as "
                    "tokenizer.json has it"
                )
            ids.append(one)
        if two_way:
            return self._of_two_tokens(ids, texts)
        activation = self._activation(len(texts))
        return _task((self._rows(ids),), tuple(texts), activation, scores_pairs=len(texts) == 1)

    def of_scored_tokens(self, tokens: Sequence[int]) -> PooledTask:
        """Return the task of a score that is the logit of a token, after the one that says the opposite, if any.

        As with sentence-transformers, a template that comes with the checkpoint writes pairs, or the tokenizer does.
        """
        changed = next((name for name in _CHANGES_LOGITS if self.fields.get(name, 1) != 1), None)
        if changed:
            raise ConfigError(f"{self.fields.where}: {changed} is not supported with scores that are logits of tokens")
        if len(tokens) == 2:
            found = dataclasses.replace(self._of_two_tokens(tokens, ("false", "true")), pair_template="")
            return dataclasses.replace(found, activation="none") if self._activation(1) == "none" else found
        activation = self._activation(1)
        return _task((self._rows(tokens),), ("true",), activation, scores_pairs=True)

    def of_reranker(self) -> PooledTask:
        """Return the task of a Qwen3-Reranker as published: its config is that of any Qwen3, its answers are no or yes.

        Raises `ConfigError` for another family, or a vocabulary without both tokens.
        """
        if self.model.bidirectional:
            raise ConfigError(
                f"{self.fields.where}: convert=classify: {self.model.name} has no head of labels; its "
                "…ForSequenceClassification has one. Leave convert at auto for embeddings, which rank documents, too"
            )
        ids: Sequence[int | None] = (0, 1) if self.tokenizer is None else ()
        if self.tokenizer is not None and self.model.family == _QWEN3:
            ids = token_ids(self.tokenizer, _NO_YES)
        found = [one for one in ids if one is not None]
        if len(found) != 2 or self.model.family != _QWEN3:
            raise ConfigError(
                f"{self.fields.where}: convert=classify: {self.model.name} has no head of labels; to make one of the "
                'logits of tokens, name them: --hf-overrides \'{"classifier_from_token": ["no", "yes"], "method": '
                f'"{_TWO_WAY}"}}\''
            )
        return self._of_two_tokens(found, _NO_YES)

    def _of_two_tokens(self, tokens: Sequence[int], labels: Sequence[str]) -> PooledTask:
        """Return the task of a score that is the probability of the second of two tokens, among both."""
        return _task((self._rows(tokens),), tuple(labels), "softmax", scores_pairs=True, template=self._template)

    def _rows(self, tokens: Sequence[int]) -> PooledLayer:
        """Return the layer that is these rows of the head of tokens. Raises `ConfigError` if it doesn't have them."""
        vocab_size = self.fields.integer("vocab_size", WIDTH, int(WIDTH.most))
        if max(tokens) >= vocab_size:
            raise ConfigError(f"{self.fields.where}: token {max(tokens)} scores, but vocab_size is {vocab_size}")
        return PooledLayer("lm_head", self._width, len(tokens), tokens=tuple(tokens))

    @property
    def _width(self) -> int:
        return self.fields.integer("hidden_size", WIDTH)

    @property
    def _template(self) -> str:
        return "qwen3_reranker" if self.model.family == _QWEN3 else ""

    def _activation(self, labels: int) -> LabelActivation:
        """Return what makes scores of logits, by default a probability of one label or among several."""
        fields = self.fields
        problem = fields.text("problem_type", "")
        if problem:
            if problem not in _PROBLEMS:
                raise fields.error("problem_type", f"one of {', '.join(_PROBLEMS)}")
            return _PROBLEMS[problem]
        # sentence-transformers has written it to one file or the other
        own = Fields(fields.object("sentence_transformers"), f"{fields.where}: sentence_transformers")
        places = [(own, "activation_fn"), (fields, "sbert_ce_default_activation_function")]
        if self.source is not None and self.source.kind != "gguf":
            places.insert(0, (sentence_fields(self.source.path), "activation_fn"))
        where, name = next((place for place in places if place[0].get(place[1])), places[-1])
        function = where.text(name, "")
        if not function:
            return "sigmoid" if labels == 1 else "softmax"
        found = _FUNCTIONS.get(function.rpartition(".")[2]) if function.startswith("torch.nn.modules.") else None
        if found is None:
            raise where.error(name, f"one of torch.nn.modules' {', '.join(_FUNCTIONS)}")
        return found


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


def _labels(fields: Fields, default: int) -> tuple[str, ...]:
    """Return the labels of `id2label`, in the order of ids, or as many as `num_labels`. Raises `ConfigError`."""
    names: Mapping[str, Any] = fields.object("id2label")
    count = len(names) or fields.integer("num_labels", WIDTH, default)
    labels = [names.get(str(i), f"LABEL_{i}") for i in range(count)]
    if names and {str(i) for i in range(count)} != set(names):
        raise fields.error("id2label", f"an object with a label for each id from 0 to {count - 1}")
    return tuple(map(str, labels))
