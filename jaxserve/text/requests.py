"""Makes engine requests from the ids of prompts and sampling parameters, for both the server and `LLM`.

Owns the checks against the vocabulary and the set of ids that end an output. Never tokenizes and never submits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxserve.api_types import MAX_STOP_IDS, EngineInfo, EngineRequest, SamplingParams, ThinkingBudget
from jaxserve.errors import InvalidRequestError
from jaxserve.text.stop_regex import check_patterns
from jaxserve.text.tokenizers.tokenizer import Tokenizer

MAX_PRIORITY = 2**31 - 1
# What a pooled request draws.
_NOTHING = SamplingParams(max_tokens=0)


def sample_requests(
    name: str,
    prompt_ids: list[int],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    info: EngineInfo,
    *,
    priority: int | None = None,
    cache_salt: str | None = None,
    grammar: str = "",
    thinking: ThinkingBudget | None = None,
) -> list[EngineRequest]:
    """Return the requests for the `n` samples of one prompt, named `name`-0, -1 and so on.

    A higher `priority` is served first; only requests with the same `cache_salt` share cached prefixes. `grammar` is
    the checked grammar of `sampling.structured_outputs`. Raises `InvalidRequestError` for a value out of range.
    """
    check_patterns(sampling.stop_regex)
    stop_ids = _stop_ids(sampling, tokenizer, info.vocab_size)
    _check_priority(priority or 0, info)
    # The engine knows grammars only, whichever form they came in
    sampling = msgspec.structs.replace(sampling, structured_outputs=None)
    namespace = _namespace(cache_salt)
    return [
        EngineRequest(
            request_id=f"{name}-{sample}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            stop_ids=stop_ids,
            group_id=name,
            sample=sample,
            priority=priority,
            namespace=namespace,
            grammar=grammar,
            thinking=thinking,
        )
        for sample in range(sampling.n)
    ]


def pooled_requests(
    name: str,
    prompts: Sequence[list[int]],
    info: EngineInfo,
    *,
    second_starts: Sequence[int | None] | None = None,
    priority: int | None = None,
    cache_salt: str | None = None,
) -> list[EngineRequest]:
    """Return a request for the vector of each prompt, named `name`-0, -1 and so on. See `sample_requests`.

    They are one group: a full queue refuses all of them or none. `second_starts` says of pairs where the second text
    begins. Raises `InvalidRequestError` for ids beyond the model's vocabulary, which a larger tokenizer makes, too.
    """
    _check_priority(priority or 0, info)
    namespace = _namespace(cache_salt)
    for number, ids in enumerate(prompts):
        check_ids(ids, info.vocab_size, param=f"text {number}")
    return [
        EngineRequest(
            request_id=f"{name}-{number}",
            prompt_ids=ids,
            sampling=_NOTHING,
            group_id=name,
            sample=number,
            priority=priority,
            namespace=namespace,
            pooled=True,
            second_start=second_start,
        )
        for number, (ids, second_start) in enumerate(zip(prompts, second_starts or [None] * len(prompts), strict=True))
    ]


def check_ids(ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raise `InvalidRequestError` unless all `ids` are in the model's vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{param} holds the token id {wrong}, which is not in the vocabulary: ids are in [0, {vocab_size - 1}]",
            param=param,
        )


def check_num_logprobs(count: int | None, most: int, *, param: str) -> None:
    """Raise `InvalidRequestError` if a request asks for more alternatives to each token than `max_logprobs` allows."""
    if count is not None and count > most:
        raise InvalidRequestError(
            f"{param} must be at most {most}, got {count}: this is the limit that --max-logprobs sets", param=param
        )


def _namespace(cache_salt: str | None) -> str:
    if cache_salt == "":
        raise InvalidRequestError("cache_salt is empty: give a text, or leave it out", param="cache_salt")
    return cache_salt or ""


def _check_priority(priority: int, info: EngineInfo) -> None:
    """Raise if a priority would have no effect, since it would be silently ignored."""
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {priority}", param="priority"
        )
    if priority and not info.uses_priorities:
        raise InvalidRequestError(
            f"priority is {priority}, but this engine schedules by {info.schedule_policy}: only 0 is accepted unless "
            "it is started with --schedule-policy priority",
            param="priority",
        )


def _stop_ids(sampling: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    check_ids(sampling.stop_token_ids, vocab_size, param="stop_token_ids")
    check_ids(tuple(sampling.logit_bias), vocab_size, param="logit_bias")
    own = tokenizer.eos_ids
    total = len(own) + len(sampling.stop_token_ids)
    if total > MAX_STOP_IDS:
        raise InvalidRequestError(
            f"stop_token_ids and the model's own {len(own)} end tokens make {total}; "
            f"at most {MAX_STOP_IDS} are supported",
            param="stop_token_ids",
        )
    return tuple(dict.fromkeys((*(() if sampling.ignore_eos else own), *sampling.stop_token_ids)))
