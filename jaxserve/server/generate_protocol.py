"""The shapes of `/generate`: what SGLang's clients send, and what they get. Owns shapes only."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.api_types import SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.openai.protocol import SamplingFields, check_logprobs

# SGLang's names of fields that have another name elsewhere.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_NOT_BUILT = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params")


class GenerateSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`. Null everywhere means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None

    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    custom_params: Any = None
    spaces_between_special_tokens: Any = None

    def sampling(self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's view of these fields. Raises `InvalidRequestError` naming the field that is out of range."""
        given = {
            _OTHER_NAMES.get(name, name): getattr(self, name)
            for name in self.__struct_fields__
            if name not in (*_NOT_BUILT, "spaces_between_special_tokens")
        }
        try:
            fields = SamplingFields(**given)
            return fields.sampling(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        except InvalidRequestError as error:
            ours = {other: name for name, other in _OTHER_NAMES.items()}
            name = ours.get(error.param or "", error.param or "")
            message = str(error).replace(error.param or name, name, 1)
            raise InvalidRequestError(f"sampling_params.{message}", param=f"sampling_params.{name}") from error


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/generate`: `text` or `input_ids`, one prompt or a list of them.

    `logprob_start_len` is the first token of the prompt that log probabilities are wanted of; -1 for none.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling = msgspec.field(default_factory=GenerateSampling)
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def refuse_unsupported(self) -> None:
        """Raises `InvalidRequestError` naming a field whose value asks for what isn't built, or makes no sense."""
        for name in _NOT_BUILT:
            if getattr(self.sampling_params, name) is not None:
                field = f"sampling_params.{name}"
                raise InvalidRequestError(f"{field} is not supported yet: only null is accepted", param=field)
        if self.sampling_params.spaces_between_special_tokens not in (None, True):
            field = "sampling_params.spaces_between_special_tokens"
            raise InvalidRequestError(f"{field} is not supported: only true is accepted", param=field)
        for name in ("logprob_start_len", "top_logprobs_num"):
            if getattr(self, name) is not None and not self.return_logprob:
                raise InvalidRequestError(f"{name} needs return_logprob to be true", param=name)
        if self.logprob_start_len is not None and self.logprob_start_len < -1:
            raise InvalidRequestError(
                f"logprob_start_len must be -1 or more, got {self.logprob_start_len}", param="logprob_start_len"
            )
        check_logprobs("top_logprobs_num", self.top_logprobs_num)

    @property
    def first_logprob(self) -> int | None:
        """The first prompt token that log probabilities are wanted of, None when only the output's are."""
        return None if self.logprob_start_len in (None, -1) else self.logprob_start_len


class MetaInfo(msgspec.Struct, omit_defaults=True):
    """What is known of one output. `cached_tokens` of the prompt came from the prefix cache; it and `e2e_latency`
    (seconds) come with the end. Log probabilities are [value, token id, text or null], one a token."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[tuple[float | None, int, str | None]] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[tuple[float | None, int, str | None]] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[tuple[float | None, int, str | None]]] | msgspec.UnsetType = msgspec.UNSET


class GenerateOutput(msgspec.Struct):
    """One output; `index` says which of several an event of a stream belongs to."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
