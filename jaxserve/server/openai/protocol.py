"""Every field of `/v1/completions` and `/v1/chat/completions`, and what becomes of it.

A field is supported (it has a type here), or inert (`INERT`: its value can't change the answer), or known and not built
(`ONLY`: null or the listed values, which ask for nothing, pass; anything else is a 400 that names it). A field that is
not here is a 400 with the nearest name. Owns shapes only: no engine, no text.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from jaxserve.api_types import MAX_LOGPROBS, SamplingParams
from jaxserve.errors import InvalidRequestError

MAX_STOP_STRINGS = 16

# Who asks and how answers are kept or billed at OpenAI: accepted with any value.
INERT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
)

_ONLY_SHARED: dict[str, tuple[object, ...]] = {
    "best_of": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "lora_path": (),
}
_ONLY_COMPLETION: dict[str, tuple[object, ...]] = {"suffix": ("",)}
_ONLY_CHAT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "mm_processor_kwargs": (),
}

# Names that are the same here and in SamplingParams.
_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "seed", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage` asks for a last chunk with the token counts, and `continuous_usage_stats` with it for the counts
    so far in every chunk, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. Null everywhere means the default.

    Among requests that wait, a higher `priority` is served first, and may preempt a lower one that runs. Only requests
    of one `cache_salt` share cached prefixes.
    """

    only: ClassVar[dict[str, tuple[object, ...]]] = _ONLY_SHARED

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None

    best_of: Any = None
    store: Any = None
    service_tier: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    spaces_between_special_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    lora_path: Any = None

    def refuse_unsupported(self) -> None:
        """Raises `InvalidRequestError` naming a field whose value asks for what isn't built."""
        for name, allowed in self.only.items():
            value = getattr(self, name)
            if value is None or value in allowed:
                continue
            if name == "best_of":
                if value != (self.n or 1):
                    raise InvalidRequestError("best_of is not supported unless it equals n", param=name)
                continue
            shown = " or ".join(["null", *(msgspec.json.encode(item).decode() for item in allowed)])
            raise InvalidRequestError(f"{name} is not supported yet: only {shown} is accepted", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")

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
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=self._logit_bias(),
            stop=self._stop(),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **given,
        )

    def _stop(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are supported", param="stop"
            )
        return stops

    def _logit_bias(self) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10):
                raise InvalidRequestError(
                    f"logit_bias keys must be token ids written as strings, got {key[:40]!r}", param="logit_bias"
                )
            bias[int(key)] = value
        return bias


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`. `logprobs` counts alternatives, 0 to 20 (OpenAI stops at 5)."""

    only: ClassVar[dict[str, tuple[object, ...]]] = _ONLY_SHARED | _ONLY_COMPLETION

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    suffix: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content; only parts of type `text` are supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat. What OpenAI's client adds to an assistant's message is accepted while it is null."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    only: ClassVar[dict[str, tuple[object, ...]]] = _ONLY_SHARED | _ONLY_CHAT

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None

    def output_limit(self) -> int | None:
        """`max_completion_tokens`, or its older name; None when neither is given."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives wanted beside each token, None when no log probabilities are."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None


def check_logprobs(name: str, value: int | None) -> None:
    """Raises unless `value` is None or a number of alternatives that is supported."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} must be in [0, {MAX_LOGPROBS}], got {value}", param=name)
