"""Log probabilities of an answer's tokens, one entry per token, as chat and Responses write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxserve.api_types import TokenLogprobs
from jaxserve.server.generation.responder import LOGPROB_FLOOR

if TYPE_CHECKING:
    from jaxserve.text.tokenizers.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct):
    """A token and its log probability; `bytes` is exact where `token` can't be."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobInfo(msgspec.Struct):
    """The sampled token and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def token_names(tokenizer: Tokenizer, *, as_ids: bool) -> Callable[[int], str]:
    """Return what a token is called: its text, or `token_id:ID`, as several tokens can have one text."""
    return "token_id:{}".format if as_ids else tokenizer.token_text


def token_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[TokenLogprobInfo]:
    """Return an entry for each token. As in vLLM, the chosen token is the first of the alternatives, before the
    likeliest ones, and counts as one of them."""
    name = token_names(tokenizer, as_ids=as_ids)

    def named(token: int, logprob: float) -> tuple[str, float, list[int]]:
        return name(token), max(logprob, LOGPROB_FLOOR), list(tokenizer.token_bytes(token))

    return [
        TokenLogprobInfo(
            *named(entry.token_id, entry.logprob),
            [TopLogprob(*named(token, value)) for token, value in _chosen_first(entry)],
        )
        for entry in entries
    ]


def _chosen_first(entry: TokenLogprobs) -> list[tuple[int, float]]:
    others = [one for one in zip(entry.top_ids, entry.top_logprobs) if one[0] != entry.token_id]
    return [(entry.token_id, entry.logprob), *others][: len(entry.top_ids)]
