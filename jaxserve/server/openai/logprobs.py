"""Converts the engine's log probabilities to the shape of completions. Computes none: it adds and arranges texts.

`name` gives the name of a token: its text or its id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxserve.api_types import TokenLogprobs
from jaxserve.server.generation.responder import LOGPROB_FLOOR
from jaxserve.server.openai.responses import CompletionLogprobs
from jaxserve.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from jaxserve.text.tokenizers.tokenizer import Tokenizer


def prompt_logprobs(
    name: Callable[[int], str], ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Return the legacy shape for an echoed prompt whose tokens begin at `offsets`."""
    shaped = completion_logprobs(name, entries, offsets)
    shaped.tokens = [name(token) for token in ids]
    return shaped


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
    """Return where each token of a prompt given as ids begins in its text."""
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=skip_special_tokens)
    offsets, length = [], 0
    for token in ids:
        offsets.append(length + detokenizer.num_chars_from_held_bytes(token))
        length += len(detokenizer.push((token,)))
    return offsets


def completion_logprobs(
    name: Callable[[int], str], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Return the legacy shape for tokens that begin at `offsets` in the choice's text."""
    return CompletionLogprobs(
        ["" if entry is None else name(entry.token_id) for entry in entries],
        [None if entry is None else max(entry.logprob, LOGPROB_FLOOR) for entry in entries],
        [None if entry is None else _top(name, entry) for entry in entries],
        list(offsets),
    )


def extend(all_of: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Append `more` to `all_of`, in place."""
    all_of.tokens += more.tokens
    all_of.token_logprobs += more.token_logprobs
    all_of.top_logprobs += more.top_logprobs
    all_of.text_offset += more.text_offset


def _top(name: Callable[[int], str], entry: TokenLogprobs) -> dict[str, float]:
    # Several ids can have the same text; the sampled token's entry wins, then the likeliest one's.
    top = {name(entry.token_id): max(entry.logprob, LOGPROB_FLOOR)}
    for token, logprob in zip(entry.top_ids, entry.top_logprobs):
        top.setdefault(name(token), max(logprob, LOGPROB_FLOOR))
    return top
