"""Vectors, scores and labels of `LLM`: makes pooled requests of texts, runs them, and makes outputs of the vectors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tqdm import tqdm

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent
from jaxserve.engine.client import SharedEngine
from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxserve.model_source.pooling import ModelTask, PooledTask
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.pair_forms import (
    EncodedPair,
    PairTemplate,
    WrittenPair,
    check_instruction,
    choose_form,
    default_instruction,
    encode_pairs,
    encode_written_pairs,
    qwen3_pair,
)
from jaxserve.text.pooled_texts import TextLimits, check_not_empty, encode_texts, with_prompt
from jaxserve.text.pooled_vectors import (
    Vector,
    best_label,
    by_token,
    check_dimensions,
    embedding,
    label_values,
    read_vector,
    relevance,
    similarity,
)
from jaxserve.text.prompt_forms import Prompt, read_prompts
from jaxserve.text.requests import check_ids, pooled_requests
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
from jaxserve.text.tokenizers.tokenizer import Tokenizer

PooledMethod = Literal["embed", "score", "classify", "reward", "encode"]
_MADE = {"embed": "embeddings", "token_embed": "a vector of each token", "classify": "labels of texts"}


def check_method(task: ModelTask, method: PooledMethod) -> None:
    """Raise `InvalidRequestError` unless a model can be asked by a method of `LLM`."""
    pooled = task.pooled
    if pooled is None:
        raise InvalidRequestError(
            'this model generates text; LLM(model, runner="pooling") makes vectors instead, and '
            'runner="generate", convert="embed" both'
        )
    methods = [use for use in pooled.uses if use != "token_embed"] + (["reward"] if pooled.kind == "classify" else [])
    if method not in (*methods, "encode"):
        made = _MADE[pooled.uses[0]]
        raise InvalidRequestError(f"this model makes {made}, by {', '.join(methods)} and encode; it has no {method}")


class OfflinePooling:
    """Has an engine make the embeddings, scores and labels of `task`.

    `source` is the text of the chat template, `chat_template` the setting that chose it, and `template_defaults` are
    arguments of it.
    """

    def __init__(
        self,
        engine: SharedEngine,
        tokenizer: Tokenizer,
        task: PooledTask,
        template: ChatTemplate,
        source: str,
        chat_template: str | None,
        template_defaults: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._task = task
        self._template = template
        self._form = choose_form(task, chat_template, source)
        self._pair_template = PairTemplate(task, source)
        self._template_defaults = template_defaults
        self._numbers = itertools.count()

    def embed(
        self, prompts: Prompt | Sequence[Prompt], dimensions: int | None, normalize: bool | None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt."""
        check_dimensions(dimensions, self._task)
        outputs = []
        for event, ids, vector in self._vectors(prompts, **options):
            numbers = embedding(vector, self._task, dimensions=dimensions, normalize=normalize)
            outputs.append(_output(event, ids, EmbeddingOutput(numbers.tolist())))
        return outputs

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_activation: bool, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """Return the values of labels of each prompt."""
        outputs = []
        for event, ids, vector in self._vectors(prompts, **options):
            values = label_values(vector, self._task.activation if use_activation else "none")
            outputs.append(_output(event, ids, ClassificationOutput(values, best_label(values, self._task))))
        return outputs

    def encode(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vector of each prompt, or of each of its tokens, as the model computes it."""
        found = self._vectors(prompts, **options)
        return [_output(event, ids, PoolingOutput(by_token(v, self._task).tolist())) for event, ids, v in found]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each document with its query, which may be one for all."""
        first, second = ([side] if isinstance(side, str) else list(side) for side in (queries, documents))
        if not second or len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"score has {len(first)} texts and {len(second)} others: give one for all, or one for each"
            )
        names = [[f"{name}[{number}]" for number in range(len(side))] for name, side in (("a", first), ("b", second))]
        for text, name in zip([*first, *second], [*names[0], *names[1]], strict=True):
            check_not_empty(text, name)
        limits = TextLimits.of(self._engine.info.max_model_len, self._task, truncate_prompt_tokens)
        pairs = list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))
        if self._task.kind == "classify" and self._form == "template":
            self._pair_template.check({}, None if instruction is None else ("instruction", instruction))
        else:
            check_instruction("tokenizer" if self._task.kind == "embed" else self._form, instruction)
        if self._task.kind == "classify":
            encoded = self._encode_pairs(pairs, limits, names[1], instruction)
            results = self._run([pair.ids for pair in encoded], use_tqdm, [pair.second_start for pair in encoded])
            return [_output(event, ids, ScoringOutput(relevance(v, self._task))) for event, ids, v in results]
        texts = with_prompt(self._task, [*first, *second], None)
        around = self._tokenizer.special_tokens_around(1)
        prompts = encode_texts(self._tokenizer, texts, around, limits, [*names[0], *names[1]])
        found = list(self._run(prompts, use_tqdm))
        left, right = found[: len(first)], found[len(first) :]
        return [
            _output(event, one_ids + ids, ScoringOutput(similarity(one, vector, self._task)))
            for (_, one_ids, one), (event, ids, vector) in zip(left * (len(right) // len(left)), right, strict=True)
        ]

    @functools.cached_property
    def _marks(self) -> EscapedMarks:
        return EscapedMarks(self._tokenizer)

    def _encode_pairs(
        self, pairs: list[tuple[str, str]], limits: TextLimits, names: list[str], instruction: str | None
    ) -> list[EncodedPair]:
        tokenizer = self._tokenizer
        instruction = default_instruction(self._task) if instruction is None else instruction
        if self._form == "tokenizer":
            pairs = [((instruction or "") + query, document) for query, document in pairs]
            return encode_pairs(tokenizer, pairs, limits, names)
        marks = self._marks
        if self._form == "qwen3_reranker":
            written = [qwen3_pair(query, document, instruction, marks) for query, document in pairs]
            return encode_written_pairs(tokenizer, marks, written, limits, names)
        told = None if instruction is None else marks.escape(instruction)
        arguments = self._pair_template.arguments(told, self._template_defaults)

        def write(query: str, document: str) -> str:
            messages = self._pair_template.messages(marks.escape(query), marks.escape(document), told)
            return self._template.render(messages, **arguments)

        written = [WrittenPair(write(*pair), write(pair[0], "")) for pair in pairs]
        return encode_written_pairs(tokenizer, marks, written, limits, names)

    def _vectors(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None,
        use_tqdm: bool,
        prompt_name: str | None = None,
    ) -> Iterator[tuple[TokenEvent, list[int], Vector]]:
        info = self._engine.info
        limits = TextLimits.of(info.max_model_len, self._task, truncate_prompt_tokens)
        around = self._tokenizer.special_tokens_around(1)
        encoded = []
        for number, prompt in enumerate(read_prompts(prompts)):
            name = f"prompts[{number}]"
            check_not_empty(prompt, name)
            if isinstance(prompt, str):
                encoded += encode_texts(
                    self._tokenizer, with_prompt(self._task, [prompt], prompt_name), around, limits, [name]
                )
            elif prompt_name is not None:
                raise InvalidRequestError(f"prompt_name needs texts, and {name} is ids", param="prompt_name")
            else:
                check_ids(prompt, info.vocab_size, param=name)
                encoded.append(limits.fit_ids(prompt, name))
        return self._run(encoded, use_tqdm)

    def _run(
        self, prompts: list[list[int]], use_tqdm: bool, second_starts: Sequence[int | None] | None = None
    ) -> Iterator[tuple[TokenEvent, list[int], Vector]]:
        """Run prompts and return the event, the ids and the vector of each, in their order."""
        name = f"pooled-{next(self._numbers)}"
        requests = pooled_requests(name, prompts, self._engine.info, second_starts=second_starts)
        ended = self._events(requests, use_tqdm)
        events = [ended[request.request_id] for request in requests]
        return ((event, ids, read_vector(event.pooled)) for event, ids in zip(events, prompts, strict=True))

    def _events(self, requests: list[EngineRequest], use_tqdm: bool) -> dict[str, TokenEvent]:
        """Run requests and return their events. Raises `RequestFailedError` for one that fails."""
        ended: dict[str, TokenEvent] = {}
        try:
            next_events = self._engine.submit(requests)
            with tqdm(total=len(requests), desc="pool", unit="seq", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while len(ended) < len(requests):
                    for event in next_events():
                        if event.finish_reason is FinishReason.ERROR:
                            raise RequestFailedError(event.error or "the engine could not finish the request")
                        ended[event.request_id] = event
                        bar.update()
        finally:
            if left := [request.request_id for request in requests if request.request_id not in ended]:
                self._engine.discard(left)
        return ended


def _output[T](event: TokenEvent, ids: list[int], outputs: T) -> PoolingRequestOutput[T]:
    cached = 0 if event.usage is None else event.usage.cached_tokens
    return PoolingRequestOutput(event.request_id, outputs, ids, cached)
