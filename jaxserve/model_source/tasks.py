"""Tells what a model is for, from its config, the files of sentence-transformers beside it, and what was asked for.

A checkpoint says that it is for vectors by a module that pools, or by an architecture without a head; that it is for
labels by a head of labels, a module that scores by logits, or `classifier_from_token` in its config. Any model that
generates may be asked for vectors, and a published Qwen3-Reranker for labels: its config is that of any Qwen3, so that
`convert=classify` takes the logits of its tokens `no` and `yes`, unless the config names others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from jaxserve.errors import ConfigError
from jaxserve.model_source.architectures import ModelClass, model_class_of
from jaxserve.model_source.fields import WIDTH, Fields
from jaxserve.model_source.gguf_metadata import GGUFMetadata
from jaxserve.model_source.gguf_pooling import GGUFPooling, dense_layers, label_layers, pooling_of_gguf
from jaxserve.model_source.label_heads import TOKENS, LabelHeads
from jaxserve.model_source.pooling import ModelTask, PooledLayer, PooledTask, Pooling, PoolingMethod
from jaxserve.model_source.sentence_modules import (
    SentenceModules,
    read_max_tokens,
    read_modules,
    read_prompts,
    read_template_arguments,
)
from jaxserve.model_source.source import ModelSource

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
Method = Literal["auto", "last", "mean", "cls", "all"]
# The names that the width has in the configs of some families
_WIDTHS = {"DistilBertModel": "dim", "NomicBertModel": "n_embd"}
_COLBERT_WIDTH = 128
_NAMED_METHODS: dict[str, PoolingMethod] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "last"}


def read_task(
    source: ModelSource | None,
    raw: Mapping[str, Any],
    *,
    tokenizer: ModelSource | None = None,
    runner: Runner = "auto",
    convert: Convert = "auto",
    pooling: Method = "auto",
) -> ModelTask:
    """Return what a model with the config `raw` is for; without a `source`, only its config.json is here.

    `tokenizer` has the ids of tokens, if that isn't `source`.
    Raises `ConfigError` for what doesn't fit the checkpoint, or isn't supported.
    """
    checkpoint = _Checkpoint(source, raw, tokenizer or source)
    generative, name = checkpoint.generates, checkpoint.model_class.name
    if runner == "generate" and checkpoint.model_class.bidirectional:
        raise ConfigError(
            f"{checkpoint.where}: runner=generate: tokens of {name} attend to later ones, so that it can't draw "
            "one after the other; leave runner at auto"
        )
    if runner == "generate" and not generative:
        raise ConfigError(
            f"{checkpoint.where}: runner=generate: {name} has no head that gives tokens; leave runner at auto"
        )
    if runner == "pooling" and convert == "none":
        raise ConfigError("runner=pooling serves vectors or labels, and convert=none asks for neither; keep one")
    kind: str | None = convert
    if convert == "none" or (runner == "generate" and convert == "auto"):
        kind = None
    elif convert == "auto":
        kind = checkpoint.kind or ("embed" if runner == "pooling" else None)
    if kind is None and not generative:
        raise ConfigError(f"{checkpoint.where}: convert=none: {name} has no head that gives tokens; leave it out")
    pooled = None
    if kind is not None:
        pooled = checkpoint.embeddings(pooling) if kind == "embed" else checkpoint.labels(pooling)
    return ModelTask(generates=runner == "generate" or kind is None, pooled=pooled)


class _Checkpoint:
    """What the files of a checkpoint say about its task."""

    def __init__(self, source: ModelSource | None, raw: Mapping[str, Any], tokenizer: ModelSource | None) -> None:
        self.where = "config.json" if source is None else str(source.config_file)
        self.model_class: ModelClass = model_class_of(raw, self.where)
        self._source = source
        self._tokenizer = tokenizer
        # A model with an encoder has some of these fields beside those of its text model
        inner = Fields(raw, self.where).object("text_config")
        width = _WIDTHS.get(self.model_class.family, "")
        self._fields = Fields({**inner, **raw}, self.where).renamed({width: "hidden_size"} if width in raw else {})
        self._folder = None if source is None or source.kind == "gguf" else source.path

    @property
    def generates(self) -> bool:
        """Whether it can generate tokens."""
        return self.model_class.head == "tokens" and not self.model_class.bidirectional

    @property
    def kind(self) -> str | None:
        """What it is for besides tokens, None if it doesn't say."""
        modules, pooling = self._modules, self._gguf_pooling
        if self._pooler is not None or pooling in ("mean", "cls", "last"):
            return "embed"
        scores = pooling == "rank" or (modules is not None and modules.scoring is not None)
        if scores or self._has_label_tokens or self.model_class.head in ("labels", "reward"):
            return "classify"
        return None if self.generates else "embed"

    def embeddings(self, method: Method) -> PooledTask:
        """Return the task of embedding texts."""
        pooler = self._pooler
        layers = () if pooler is None else pooler.layers()
        if self._gguf is not None:
            layers = dense_layers(self._gguf)
        elif self._is_colbert and not layers:
            layers = (PooledLayer("linear", self._width, self._fields.integer("dim", WIDTH, _COLBERT_WIDTH)),)
        pooling = Pooling(self._method() if method == "auto" else method, layers)
        if pooling.method in ("cls", "all") and not self.model_class.bidirectional:
            raise ConfigError(
                f"{self.where}: pooling {pooling.method} is not supported for {self.model_class.name}, whose first "
                "tokens don't see the last; last and mean are, of which --pooling chooses one"
            )
        found = PooledTask(
            kind="embed",
            pooling=pooling,
            size=layers[-1].outputs if layers else self._width,
            normalize=pooler is None or pooler.normalize or pooling.method == "all",
        )
        found = self._with_texts(found)
        self._check_layers(found)
        allowed = dataclasses.replace(WIDTH, most=found.size)
        sizes = tuple(int(size) for size in self._fields.numbers("matryoshka_dimensions", allowed))
        return dataclasses.replace(found, dimensions=sizes)

    def labels(self, method: Method) -> PooledTask:
        """Return the task of scoring texts or giving them labels. Raises `ConfigError` if there is no head for it."""
        if method not in ("auto", "last"):
            raise ConfigError(f"pooling={method} makes vectors; how labels are made is up to the model: leave it out")
        heads, modules = LabelHeads(self.model_class, self._fields, self._source, self._tokenizer), self._modules
        if modules is not None and modules.scoring is not None:
            found = heads.of_scored_tokens(modules.scored_tokens())
        elif self._has_label_tokens:
            found = heads.of_token_texts()
        elif self.model_class.head in ("labels", "reward"):
            found = heads.of_own_layers()
            if self.model_class.bidirectional and not self.model_class.is_encoder:
                found = dataclasses.replace(found, pooling=dataclasses.replace(found.pooling, method=self._method()))
        elif self._gguf is not None and self.model_class.is_encoder:
            labels = self._gguf.array(f"{self._gguf.get('general.architecture')}.classifier.output_labels")
            found = heads.of_encoder(Pooling("cls", label_layers(self._gguf)), labels)
        else:
            found = heads.of_reranker()
        return self._with_texts(found)

    def _method(self) -> PoolingMethod:
        """Return how the checkpoint pools. Raises `ConfigError` if it does so in a way that isn't supported."""
        if self._pooler is not None:
            return self._pooler.method()
        if self._gguf_pooling in ("mean", "cls", "last"):
            return self._gguf_pooling
        # NVIDIA's bidirectional Llamas have such a field, and folders that `jaxserve convert` makes of GGUF files
        named = str(self._fields.get("pooling", ""))
        if self.model_class.bidirectional and named in _NAMED_METHODS:
            return _NAMED_METHODS[named]
        if self.model_class.is_encoder:
            return "all" if self._is_colbert else "cls"
        return "mean" if self.model_class.bidirectional else "last"

    @functools.cached_property
    def _gguf_pooling(self) -> GGUFPooling:
        return "none" if self._gguf is None else pooling_of_gguf(self._gguf)

    @functools.cached_property
    def _gguf(self) -> GGUFMetadata | None:
        source = self._source
        return GGUFMetadata(source.path) if source is not None and source.kind == "gguf" else None

    @functools.cached_property
    def _modules(self) -> SentenceModules | None:
        return None if self._folder is None else read_modules(self._folder)

    @property
    def _pooler(self) -> SentenceModules | None:
        """The modules, if they make vectors."""
        return None if self._modules is None or not self._modules.embeds else self._modules

    @property
    def _is_colbert(self) -> bool:
        return self.model_class.head == "vectors of tokens"

    @property
    def _has_label_tokens(self) -> bool:
        return self._fields.get(TOKENS) is not None

    @property
    def _width(self) -> int:
        return self._fields.integer("hidden_size", WIDTH)

    def _with_texts(self, task: PooledTask) -> PooledTask:
        """Return a task with the prompts of sentence-transformers and its limit of tokens."""
        if self._folder is None or self._modules is None:
            return task
        prompts, default = read_prompts(self._folder)
        if self._pooler is not None:
            self._pooler.check_prompts(bool(prompts))
        return dataclasses.replace(
            task,
            prompts=prompts,
            default_prompt=default,
            max_tokens=read_max_tokens(self._folder),
            template_arguments=read_template_arguments(self._folder),
        )

    def _check_layers(self, task: PooledTask) -> None:
        width = self._width
        for layer in task.pooling.layers:
            if layer.inputs != width:
                raise ConfigError(
                    f"{self._folder}/{layer.name.removesuffix('/linear')}: in_features={layer.inputs}, but vectors "
                    f"have {width} numbers there"
                )
            width = layer.outputs
