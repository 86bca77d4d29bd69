"""Every field of `/v1/completions` and `/v1/chat/completions` that does something, and what becomes of it.

A field is supported (it has a type here), or inert (its value can't change the answer), or known and not built
(`known_fields.py`). One that is nowhere is a 400 with the nearest name. Owns shapes only: no engine, no text.
"""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any, ClassVar

import msgspec

from jaxserve.api_types import (
    MinP,
    NumLogprobs,
    NumSamples,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.fields import (
    MAX_SEQUENCES,
    TOKEN_KEY,
    LogitBias,
    ModelName,
    Name,
    Null,
    NullOrFalse,
    NullOrNoList,
    NullOrNoObject,
    NullOrNoText,
    NullOrTrue,
    Priority,
    StopIds,
    StopPatterns,
    StopStrings,
    Text,
    TokenLimit,
    described,
    fitted,
    needs,
    only,
    refuse_asking,
)
from jaxserve.server.openai.known_fields import KnownOpenAI
from jaxserve.text.stop_regex import check_patterns

ROLES = ("system", "developer", "user", "assistant")
# Parts of a message that no template gets yet.
NOT_BUILT = ("audio", "function_call", "tool_calls", "tool_call_id")

# Names that are the same here and in SamplingParams.
_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "seed", "ignore_eos", "skip_special_tokens"),
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage` asks for a last chunk with the token counts, and `continuous_usage_stats` with it for the counts
    so far in every chunk, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(KnownOpenAI, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. Null everywhere means the default.

    Among requests that wait, a higher `priority` is served first, and may preempt a lower one that runs. Only requests
    of one `cache_salt` share cached prefixes. Where vLLM and SGLang have two names for one thing, both are known:
    `include_stop_str_in_output` and `no_stop_trim`, and `request_id` and `rid`, by which `/abort_request` finds the
    request.
    """

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (needs("stream_options", [None], "stream"),)

    model: ModelName | None = None
    max_tokens: TokenLimit | None = None
    n: NumSamples | None = None
    best_of: Annotated[NumSamples | None, described({"enum": [None, 1]})] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    min_tokens: TokenLimit | None = None
    seed: Seed | None = None
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

    # Who asks and how answers are kept or billed at OpenAI: accepted with any value.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None

    def refuse_unsupported(self) -> None:
        """Raises `InvalidRequestError` naming a field whose value asks for what isn't built, or makes no sense."""
        refuse_asking(self)
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequestError("best_of is not supported unless it equals n", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the client gave the request."""
        return tuple(name for name in (self.rid, self.request_id) if name is not None)

    def response_id(self, kind: str) -> str:
        """The id that the response has: the client's, where it gives one."""
        return self.rid or f"{kind}-{self.request_id or uuid.uuid4().hex}"

    def engine_name(self, response_id: str) -> str:
        """A name of its own in the engine, where a client's id may be open already."""
        return f"{response_id}-{uuid.uuid4().hex}" if self.names else response_id

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream brings the token counts so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """The engine's view of these fields. Raises `InvalidRequestError` naming the field that is out of range."""
        stop_regex = _several(self.stop_regex)
        check_patterns(stop_regex)
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self._logit_bias(),
            stop=_several(self.stop),
            stop_regex=stop_regex,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=bool(self.include_stop_str_in_output or self.no_stop_trim),
            **given,
        )

    def _logit_bias(self) -> dict[int, float]:
        for key in self.logit_bias or {}:
            if not re.fullmatch(TOKEN_KEY, key):
                raise InvalidRequestError(
                    f"logit_bias keys must be token ids written as strings, got {key[:40]!r}", param="logit_bias"
                )
        return {int(key): value for key, value in (self.logit_bias or {}).items()}


def _several(texts: str | list[str] | None) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts or ())


PROMPT_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, **fitted("token_id")}, **fitted("prompt_ids")}
PROMPT_TEXT = {"type": "string", "minLength": 1}


def prompts(*kinds: dict[str, Any]) -> msgspec.Meta:
    """The schema of a prompt, or of a list of prompts of one kind."""
    listed = [{"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_SEQUENCES} for kind in kinds]
    return described({"anyOf": [*kinds, *listed]})


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`. `logprobs` counts alternatives, 0 to 20 (OpenAI stops at 5)."""

    prompt: Annotated[str | list[str | int | list[int]], prompts(PROMPT_TEXT, PROMPT_IDS)]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None

    suffix: NullOrNoText = None
    prompt_embeds: Null = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type `text` are supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """What is known of a message of a chat; its other keys go to the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_NO_TEXT = {"properties": {"role": {"const": "assistant"}}}
_SOME_TEXT = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
    }
    | {name: {"enum": [None, []]} for name in NOT_BUILT},
    "required": ["role"],
    "anyOf": [_NO_TEXT, _SOME_TEXT],
}
_SAYS_SOMETHING = {"properties": {"content": {"type": "string", "minLength": 1}}, "required": ["content"]}
# It is the last message that goes on; a schema can only speak of all.
_GOES_ON = {"add_generation_prompt": {"enum": [None, False]}, "messages": {"items": _SAYS_SOMETHING}}
CONTINUED = {"anyOf": [{"properties": {"continue_final_message": {"enum": [None, False]}}}, {"properties": _GOES_ON}]}
Messages = Annotated[list[dict[str, Any]], described({"type": "array", "items": MESSAGE, "minItems": 1})]
TemplateArguments = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=fitted("template_arguments"))]
Documents = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema=fitted("documents"))]


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`. No parser takes reasoning apart here: it is not separated nor held back."""

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        *SamplingFields.conditions,
        needs("top_logprobs", [None, 0], "logprobs"),
        CONTINUED,
    )

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: Documents | None = None

    tools: NullOrNoList = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: NullOrNoList = None
    function_call: Annotated[Any, only("none", "auto")] = None
    reasoning_effort: Null = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Null = None
    prediction: Null = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Null = None

    chat_template: Null = None
    echo: NullOrFalse = None
    include_reasoning: NullOrTrue = None
    media_io_kwargs: NullOrNoObject = None
    mm_processor_kwargs: NullOrNoObject = None
    return_prompt_text: NullOrFalse = None

    separate_reasoning: Annotated[Any, only(True, False)] = None
    stream_reasoning: NullOrTrue = None
    reasoning: Null = None
    task: Null = None
    input_ids: Null = None
    return_meta_info: NullOrFalse = None

    def output_limit(self) -> int | None:
        """The smaller of `max_completion_tokens` and its older name; None when neither is given."""
        return min(
            (limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None), default=None
        )

    def num_logprobs(self) -> int | None:
        """Alternatives wanted beside each token, None when no log probabilities are."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
