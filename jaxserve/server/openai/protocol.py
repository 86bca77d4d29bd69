"""The request bodies of `/v1/completions` and `/v1/chat/completions`, and their conversion to sampling parameters.

A field is supported (it has a type here), inert (its value can't change the answer, `generation/inert_fields.py`) or
unsupported (most are in `generation/unsupported_fields.py`). An unknown field is a 400 that suggests the nearest name.
Owns shapes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from jaxserve import api_types
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.chat_tools import ToolChoice, Tools
from jaxserve.server.generation.message_fields import (
    CONTINUE_FINAL_MESSAGE,
    Documents,
    Messages,
    ReasoningEffort,
    TemplateArguments,
    ThinkingTokens,
)
from jaxserve.server.generation.sampling_fields import sampling_params, with_shared_options
from jaxserve.server.generation.structured_fields import StructuredFields
from jaxserve.server.http.fields import (
    PROMPT_IDS,
    PROMPT_TEXT,
    LogitBias,
    ModelName,
    Name,
    Null,
    NullOrEmptyObject,
    NullOrFalse,
    NullOrTrue,
    Priority,
    StopIds,
    StopPatterns,
    StopStrings,
    Text,
    TokenLimit,
    accepts_only,
    explicit_schema,
    prompt_schema,
    refuse_unsupported_fields,
    requires,
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream. `include_usage` adds a last chunk with the token counts; with `continuous_usage_stats` too,
    every chunk has the counts so far, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


@with_shared_options
class _FirstFields(StructuredFields, kw_only=True, forbid_unknown_fields=True):
    """The fields before the sampling options that all APIs share, in the order of `/openapi.json`."""

    model: ModelName | None = None
    max_tokens: TokenLimit | None = None
    n: api_types.NumSamples | None = None
    best_of: Annotated[api_types.NumSamples | None, explicit_schema({"enum": [None, 1]})] = None


class OpenAIFields(_FirstFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat have in common. Null always means the default.

    Among waiting requests, a higher `priority` is served first; it may preempt a running request with a lower one.
    Only requests with the same `cache_salt` share cached prefixes. Where vLLM and SGLang name a field differently, both
    names work: `include_stop_str_in_output` and `no_stop_trim`; `request_id` and `rid`, which `/abort_request` takes.
    """

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (requires("stream_options", [None], "stream"),)

    logit_bias: LogitBias | None = None
    min_tokens: TokenLimit | None = None
    seed: api_types.Seed | None = None
    stop: StopStrings | None = None
    stop_regex: StopPatterns | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: Text | None = None
    request_id: Name | None = None
    rid: Name | None = None

    parallel_tool_calls: Any = None

    def check_supported(self) -> None:
        """Raise `InvalidRequestError` for a field whose value is not supported or does not fit the others."""
        refuse_unsupported_fields(self)
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequestError("best_of is not supported unless it equals n; leave it out", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true; leave it out", param="stream_options")

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The ids that the client gave the request."""
        return tuple(name for name in (self.rid, self.request_id) if name is not None)

    def response_id(self, kind: str, http_id: str) -> str:
        """Return the id of the response: from the body if it has one, else from `http_id`, the X-Request-Id."""
        return self.rid or f"{kind}-{self.request_id or http_id}"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        options, usage = self.stream_options, self.usage
        return bool((options and options.include_usage) or (usage and usage.include))

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream has the token counts so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> api_types.SamplingParams:
        """Return the sampling parameters, with `defaults` for options that the request doesn't name.

        Raises `InvalidRequestError` naming the field that is out of range.
        """
        return sampling_params(
            self,
            defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            include_stop=bool(self.include_stop_str_in_output or self.no_stop_trim),
        )


class CompletionRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`. `logprobs` is the number of alternatives, 0 to 20 (OpenAI's limit is 5)."""

    prompt: Annotated[str | list[str | int | list[int]], prompt_schema(PROMPT_TEXT, PROMPT_IDS)]
    echo: bool | None = None
    logprobs: api_types.NumLogprobs | None = None
    add_special_tokens: bool | None = None

    suffix: Annotated[Any, accepts_only("", advice="write the model's own tokens for infilling into the prompt")] = None
    prompt_embeds: Annotated[Any, accepts_only(advice="send text or token ids as prompt")] = None
    thinking_token_budget: Annotated[Any, accepts_only(-1, advice="only chat reads reasoning; leave it out")] = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenRouter's options of reasoning: other names of `reasoning_effort` and `thinking_token_budget`; `exclude` is
    the contrary of `include_reasoning`, and `enabled` asks for reasoning or for none."""

    effort: ReasoningEffort | None = None
    max_tokens: api_types.TokenCount | None = None
    exclude: bool | None = None
    enabled: bool | None = None


_REASONING = 'send reasoning: {"enabled": true} (or false), or reasoning_effort'


class ChatRequest(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`.

    `reasoning_effort` is passed to the chat template, or switches its `enable_thinking`; where the template reads
    neither, it changes nothing, as `verbosity` never does. Reasoning comes apart from the content unless
    `separate_reasoning` is false, or not at all if `include_reasoning` is. After `thinking_token_budget` tokens of
    reasoning the answer must follow; -1 is no bound, null the server's default. `reasoning` has these as OpenRouter
    names them.
    """

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        *OpenAIFields.conditions,
        {
            "anyOf": [
                {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}},
                {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
            ]
        },
        requires("top_logprobs", [None, 0], "logprobs"),
        CONTINUE_FINAL_MESSAGE,
    )

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: api_types.NumLogprobs | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: Documents | None = None
    escape_marks: bool | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: ThinkingTokens | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    functions: Annotated[Any, accepts_only([], advice="send them as tools")] = None
    function_call: Annotated[Any, accepts_only("none", "auto", advice="choose with tool_choice")] = None
    modalities: Annotated[Any, accepts_only([], ["text"], advice="answers are text; leave it out")] = None
    audio: Annotated[Any, accepts_only(advice="answers are text; leave it out")] = None
    prediction: Null = None
    verbosity: Literal["low", "medium", "high"] | None = None
    text: Annotated[Any, accepts_only({}, advice="send its format as response_format")] = None
    thinking: Annotated[Any, accepts_only(advice=_REASONING)] = None
    enable_thinking: Annotated[Any, accepts_only(advice=_REASONING)] = None

    chat_template: Annotated[Any, accepts_only(advice="start the server with --chat-template")] = None
    echo: NullOrFalse = None
    media_io_kwargs: NullOrEmptyObject = None
    mm_processor_kwargs: NullOrEmptyObject = None
    return_prompt_text: Annotated[Any, accepts_only(False, advice="/v1/chat/completions/render gives its tokens")] = (
        None
    )

    stream_reasoning: NullOrTrue = None
    task: Null = None
    input_ids: Annotated[Any, accepts_only(advice="/v1/completions takes token ids as prompt")] = None
    return_meta_info: NullOrFalse = None

    def max_output_tokens(self) -> int | None:
        """Return the smaller of `max_completion_tokens` and its older name `max_tokens`; None if neither is given."""
        return min(
            (limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None), default=None
        )

    def reasoning_options(self) -> ReasoningOptions:
        """Return the options of reasoning, from `reasoning` and from the fields that say the same.

        Raises `InvalidRequestError` naming both if they differ.
        """
        given = self.reasoning or ReasoningOptions()
        excludes = None if self.include_reasoning is None else not self.include_reasoning
        return ReasoningOptions(
            effort=_agreed("reasoning_effort", self.reasoning_effort, "effort", given.effort),
            max_tokens=_agreed("thinking_token_budget", self.thinking_token_budget, "max_tokens", given.max_tokens),
            exclude=_agreed("include_reasoning", excludes, "exclude", given.exclude),
            enabled=given.enabled,
        )

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives to each token, or None if no log probabilities are requested."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true; send that too", param="top_logprobs")
        return None


def _agreed[T](field: str, value: T | None, option: str, given: T | None) -> T | None:
    """Return the value of a field or of the option of `reasoning` that says the same."""
    if None not in (value, given) and value != given:
        raise InvalidRequestError(f"{field} and reasoning.{option} say different things: send one of them", param=field)
    return given if value is None else value
