"""The shapes of `/generate`: what SGLang's clients send, and what they get. Owns shapes only."""

from __future__ import annotations

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
    LogitBias,
    ModelName,
    Name,
    Priority,
    StopIds,
    StopPatterns,
    StopStrings,
    Text,
    TokenLimit,
    needs,
    one_of,
    refuse_asking,
)
from jaxserve.server.openai.known_fields import KnownGenerate, KnownSampling
from jaxserve.server.openai.protocol import PROMPT_IDS, PROMPT_TEXT, SamplingFields, prompts

# SGLang's names of fields that have another name elsewhere.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}


class GenerateSampling(KnownSampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`. Null everywhere means the default."""

    max_new_tokens: TokenLimit | None = None
    min_new_tokens: TokenLimit | None = None
    n: NumSamples | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopStrings | None = None
    stop_regex: StopPatterns | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Seed | None = None

    def sampling(
        self, where: str, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The engine's view of these fields. Raises `InvalidRequestError` naming the field that is out of range."""
        given = {
            _OTHER_NAMES.get(name, name): getattr(self, name)
            for name in self.__struct_fields__
            if name not in KnownSampling.__struct_fields__
        }
        try:
            fields = SamplingFields(**given)
            return fields.sampling(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        except InvalidRequestError as error:
            ours = {other: name for name, other in _OTHER_NAMES.items()}
            name = ours.get(error.param or "", error.param or "")
            message = str(error).replace(error.param or name, name, 1)
            raise InvalidRequestError(f"{where}.{message}", param=f"{where}.{name}") from error


class GenerateRequest(KnownGenerate, kw_only=True, forbid_unknown_fields=True):
    """The body of `/generate`: `text` or `input_ids`, one prompt or a list of them.

    `sampling_params` may be a list, one for each prompt. `logprob_start_len` is the first token of the prompt that log
    probabilities are wanted of; -1 for none.
    """

    conditions: ClassVar[tuple[dict[str, Any], ...]] = (
        one_of("text", "input_ids"),
        needs("top_logprobs_num", [None, 0], "return_logprob"),
    )

    model: ModelName | None = None
    text: Annotated[str | list[str], prompts(PROMPT_TEXT)] | None = None
    input_ids: Annotated[list[int | list[int]], prompts(PROMPT_IDS)] | None = None
    sampling_params: (
        GenerateSampling
        | Annotated[list[GenerateSampling], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
        | None
    ) = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    rid: Name | None = None
    priority: Priority | None = None
    cache_salt: Text | None = None

    def refuse_unsupported(self) -> None:
        """Raises `InvalidRequestError` naming a field whose value asks for what isn't built, or makes no sense."""
        refuse_asking(self)
        for where, sampling in self.samplings.items():
            refuse_asking(sampling, f"{where}.")
        if self.top_logprobs_num and not self.return_logprob:
            raise InvalidRequestError("top_logprobs_num needs return_logprob to be true", param="top_logprobs_num")

    @property
    def samplings(self) -> dict[str, GenerateSampling]:
        """The sampling of all prompts, or of each, by where it stands in the request."""
        given = self.sampling_params
        if isinstance(given, list):
            return {f"sampling_params[{number}]": sampling for number, sampling in enumerate(given)}
        return {"sampling_params": given or GenerateSampling()}

    @property
    def first_logprob(self) -> int | None:
        """The first prompt token that log probabilities are wanted of, None when only the output's are."""
        return None if self.logprob_start_len in (None, -1) or not self.return_logprob else self.logprob_start_len


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
