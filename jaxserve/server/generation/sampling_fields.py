"""Adds the sampling options that all APIs share to the types of requests, and makes `SamplingParams` of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from jaxserve.api_types import NUMBER_OPTIONS, SHARED_OPTIONS, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.fields import TOKEN_KEY
from jaxserve.text.stop_regex import check_patterns

# Fields whose values requests and `SamplingParams` write alike
_SAME = (*SHARED_OPTIONS, "n", "min_tokens", "seed", "ignore_eos", "skip_special_tokens")


def with_shared_options[T: msgspec.Struct](kind: type[T]) -> type[T]:
    """Return a request type with the shared options after its own fields. Null always means the default."""
    fields = [(name, NUMBER_OPTIONS[name].hint | None, None) for name in SHARED_OPTIONS]
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)
    return cast(type[T], made)


def sampling_params(
    request: msgspec.Struct,
    defaults: Mapping[str, float],
    *,
    max_tokens: int,
    include_stop: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request, some of whose fields have other `names` than in `SamplingParams`.

    It need not have all fields. `defaults` are the options of requests that name none. Raises `InvalidRequestError`
    naming the field that is out of range, as `SamplingParams` does.
    """

    def given(name: str) -> Any:
        return getattr(request, (names or {}).get(name, name), None)

    stop_regex = _as_tuple(given("stop_regex"))
    check_patterns(stop_regex)
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(given("logit_bias") or {}),
        stop=_as_tuple(given("stop")),
        stop_regex=stop_regex,
        stop_token_ids=tuple(given("stop_token_ids") or ()),
        include_stop_str_in_output=include_stop,
        **{**defaults, **{name: value for name in _SAME if (value := given(name)) is not None}},
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not re.fullmatch(TOKEN_KEY, key):
            raise InvalidRequestError(
                f"logit_bias keys must be token ids written as strings, got {key[:40]!r}", param="logit_bias"
            )
    return {int(key): value for key, value in given.items()}


def _as_tuple(texts: str | list[str] | None) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts or ())
