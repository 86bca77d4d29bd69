"""What `LLM` returns, in the shapes of vLLM. Owns no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.api_types import FinishReason, SamplingParams, TokenLogprobs, Usage
from jaxserve.text.output import OutputDelta


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample of a prompt. `logprobs` has one entry per token if `SamplingParams.logprobs` is set, else is None."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The outputs of one prompt. `prompt` is None if it was given as ids; `usage` counts all samples."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of its dimensions."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True)
class ClassificationOutput:
    """A value for each label of a text, and the `label` with the largest."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclasses.dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


@dataclasses.dataclass(frozen=True)
class PoolingOutput:
    """The numbers that the model computes of a text, or of each of its tokens, before any activation or
    normalization."""

    data: list[float] | list[list[float]]


@dataclasses.dataclass(frozen=True)
class PoolingRequestOutput[T]:
    """What is pooled of a prompt, or of a pair. `num_cached_tokens` of its ids were found in the prefix cache."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


type EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
type ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
type ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclasses.dataclass(frozen=True)
class PromptTask:
    """One prompt, tokenized and checked, with its parameters."""

    prompt: str | None
    ids: list[int]
    params: SamplingParams
    priority: int | None
    cache_salt: str | None
    grammar: str


def build_output(task: PromptTask, samples: Sequence[OutputDelta]) -> RequestOutput:
    """Return the output of a prompt from those of its samples."""
    usages = [sample.usage for sample in samples if sample.usage is not None]
    return RequestOutput(
        prompt=task.prompt,
        prompt_token_ids=task.ids,
        outputs=[_build_completion(index, sample, task.params) for index, sample in enumerate(samples)],
        usage=Usage(
            prompt_tokens=len(task.ids),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
        ),
        prompt_logprobs=samples[0].prompt_logprobs,
    )


def _build_completion(index: int, sample: OutputDelta, params: SamplingParams) -> CompletionOutput:
    assert sample.finish_reason is not None
    return CompletionOutput(
        index=index,
        text=sample.text,
        token_ids=sample.token_ids,
        logprobs=None if params.logprobs is None else sample.logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )
