"""The sampling fields of requests: those that `SamplingParams` declares for all APIs, and how a request becomes one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, cast

import msgspec

from jaxserve.api_types import NUMBER_OPTIONS, SHARED_OPTIONS, SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.server.http.fields import TOKEN_KEY
from jaxserve.text.stop_regex import check_patterns

# Fields whose values requests and `SamplingParams` write alike
_SAME = (*SHARED_OPTIONS, "n", "min_tokens", "seed", "ignore_eos", "skip_special_tokens")


class StopFields(Protocol):
    """The sampling fields that requests write in other types than `SamplingParams` has."""

    logit_bias: dict[str, float] | None
    stop: str | list[str] | None
    stop_regex: str | list[str] | None
    stop_token_ids: list[int] | None


def with_shared_options[T: msgspec.Struct](kind: type[T]) -> type[T]:
    """Return a request type with the shared options after its own fields. Null always means the default."""
    fields = [(name, NUMBER_OPTIONS[name].hint | None, None) for name in SHARED_OPTIONS]
    made = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)
    return cast(type[T], made)


def sampling_params(
    request: StopFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    include_stop: bool,
    names: Mapping[str, str],
) -> SamplingParams:
    """Return the sampling parameters of a request, whose fields have other `names` than in `SamplingParams`.

    Raises `InvalidRequestError` naming the field that is out of range, as `SamplingParams` does.
    """
    stop_regex = _as_tuple(request.stop_regex)
    check_patterns(stop_regex)
    given = {name: getattr(request, names.get(name, name)) for name in _SAME}
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(request.logit_bias or {}),
        stop=_as_tuple(request.stop),
        stop_regex=stop_regex,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=include_stop,
        **{name: value for name, value in given.items() if value is not None},
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
