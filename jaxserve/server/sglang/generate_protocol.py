"""The shapes of `/generate`: the requests of SGLang's clients and their responses. Owns shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from jaxserve import api_types
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.sampling_fields import sampling_params, with_shared_options
from jaxserve.server.generation.structured_fields import StructuredSamplingFields
from jaxserve.server.generation.unsupported_fields import UnsupportedGenerateFields
from jaxserve.server.http.fields import (
    MAX_SEQUENCES,
    PROMPT_IDS,
    PROMPT_TEXT,
    LogitBias,
    ModelName,
    Name,
    Priority,
    StopIds,
    StopPatterns,
    StopStrings,
    Text,
    TokenLimit,
    one_of,
    prompt_schema,
    refuse_unsupported_fields,
    requires,
)

# The names that fields of `SamplingParams` have here
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}


@with_shared_options
class _FirstSamplingFields(StructuredSamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields before the sampling options that all APIs share, in the order of `/openapi.json`."""

    max_new_tokens: TokenLimit | None = None
    min_new_tokens: TokenLimit | None = None
    n: api_types.NumSamples | None = None


class GenerateSampling(_FirstSamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The object `sampling_params`. Null always means the default."""

    logit_bias: LogitBias | None = None
    stop: StopStrings | None = None
    stop_regex: StopPatterns | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: api_types.Seed | None = None

    def sampling(
        self,
        where: str,
        defaults: Mapping[str, float],
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> api_types.SamplingParams:
        """Return the sampling parameters, with `defaults` for options that the request doesn't name.

        Raises `InvalidRequestError` naming the field that is out of range.
        """
        try:
            return sampling_params(
                self,
                defaults,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                include_stop=bool(self.no_stop_trim),
                names=_NAMES,
            )
        except InvalidRequestError as error:
            name = _NAMES.get(error.param or "", error.param or "")
            message = str(error).replace(error.param or name, name, 1)
            raise InvalidRequestError(f"{where}.{message}", param=f"{where}.{name}") from error


class GenerateRequest(UnsupportedGenerateFields, kw_only=True, forbid_unknown_fields=True):
    """The body of `/generate`: `text` or `input_ids`, one prompt or a list of them.

    `sampling_params` and `rid` may be lists, with one for each prompt. `logprob_start_len` is the first prompt token
    whose log probability is returned; -1 means none.
    """

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        one_of("text", "input_ids"),
        requires("top_logprobs_num", [None, 0], "return_logprob"),
    )

    model: ModelName | None = None
    text: Annotated[str | list[str], prompt_schema(PROMPT_TEXT)] | None = None
    input_ids: Annotated[list[int | list[int]], prompt_schema(PROMPT_IDS)] | None = None
    sampling_params: (
        GenerateSampling
        | Annotated[list[GenerateSampling], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
        | None
    ) = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    top_logprobs_num: api_types.NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    rid: Name | Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)] | None = None
    priority: Priority | None = None
    cache_salt: Text | None = None

    def __post_init__(self) -> None:
        if self.model == "unknown":  # the gateway smg writes it where the client names no model
            self.model = None

    def check_supported(self) -> None:
        """Raise `InvalidRequestError` for a field whose value is not supported or does not fit the others."""
        refuse_unsupported_fields(self)
        for where, sampling in self.samplings.items():
            refuse_unsupported_fields(sampling, f"{where}.")
        if self.top_logprobs_num and not self.return_logprob:
            raise InvalidRequestError("top_logprobs_num needs return_logprob to be true", param="top_logprobs_num")

    @property
    def samplings(self) -> dict[str, GenerateSampling]:
        """The sampling of each prompt, or one for all prompts, by its path in the request."""
        given = self.sampling_params
        if isinstance(given, list):
            return {f"sampling_params[{number}]": sampling for number, sampling in enumerate(given)}
        return {"sampling_params": given or GenerateSampling()}

    @property
    def first_logprob(self) -> int | None:
        """The first prompt token whose log probability is returned; None if only those of the output are."""
        return None if self.logprob_start_len in (None, -1) or not self.return_logprob else self.logprob_start_len


class MetaInfo(msgspec.Struct, omit_defaults=True):
    """Facts about one output. `cached_tokens` counts the prompt tokens from the prefix cache; it and `e2e_latency`
    (seconds) are set at the end only. A log probability is [value, token id, text or null], one per token."""

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
    """One output; `index` is set in streams of several outputs."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
