"""The scores that a server gave the tokens of a window, read from a response of `/v1/completions` with `echo`."""

from __future__ import annotations

import dataclasses
import json
import math

import msgspec
import numpy as np

from jaxserve.errors import JaxserveError
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_ID_PREFIX = "token_id:"
_NO_TOKEN = -1


class _ScoredLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _ScoredChoice(msgspec.Struct):
    logprobs: _ScoredLogprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_ScoredChoice]


class NoPromptLogprobsError(JaxserveError):
    """The response has no log probabilities for the prompt, or not for every token."""


@dataclasses.dataclass(frozen=True)
class WindowScores:
    """Natural log probabilities of a window's tokens after the first, `n` in all.

    `logprobs` is `[n]`. `top_tokens` and `top_logprobs` are `[n, k]`: the likeliest tokens of each position and the
    window's own token, as numbers of `TokenNumbers`; a list with fewer entries is filled up with -1 and -inf.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class TokenNumbers:
    """Numbers the tokens that servers name: the same number for the same text, and for an id the number of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a token that is named by its text or as `token_id:N`."""
        found = self._numbers.get(name)
        if found is None:
            text = name
            if name.startswith(_ID_PREFIX):
                text = self._tokenizer.token_text(int(name.removeprefix(_ID_PREFIX)))
            found = self._numbers.setdefault(text, len(self._numbers))
            self._numbers[name] = found
        return found


def read_tokens(body: bytes, num_tokens: int) -> list[str]:
    """Return the names of the prompt's tokens, as the server echoes them. Raises `NoPromptLogprobsError`."""
    return _read(body, num_tokens).tokens[:num_tokens]


def read_scores(body: bytes, num_tokens: int, numbers: TokenNumbers) -> WindowScores:
    """Read the scores of a window of `num_tokens`. Raises `NoPromptLogprobsError`, and `JaxserveError` for NaN."""
    read = _read(body, num_tokens)
    lists = [_likeliest(read, i, numbers) for i in range(1, num_tokens)]
    shape = len(lists), max(map(len, lists))
    top_tokens, top_logprobs = np.full(shape, _NO_TOKEN, np.int32), np.full(shape, -np.inf)
    for row, likeliest in enumerate(lists):
        top_tokens[row, : len(likeliest)] = list(likeliest)
        top_logprobs[row, : len(likeliest)] = list(likeliest.values())
    return WindowScores(np.array(read.token_logprobs[1:num_tokens], float), top_tokens, top_logprobs)


def _read(body: bytes, num_tokens: int) -> _ScoredLogprobs:
    try:
        # Unlike msgspec's decoder, the json module reads the NaN that some servers write.
        completion = msgspec.convert(json.loads(body), type=_Completion)
    except (ValueError, msgspec.ValidationError) as error:
        raise NoPromptLogprobsError(f"the response is not one of /v1/completions: {error}") from None
    read = completion.choices[0].logprobs if completion.choices else None
    # Tokens that were generated after the prompt may follow.
    got = 0 if read is None else min(len(read.tokens), len(read.token_logprobs), len(read.top_logprobs))
    if read is None or got < num_tokens:
        raise NoPromptLogprobsError(f"it gave log probabilities of {got} tokens for a prompt of {num_tokens}")
    return read


def _likeliest(read: _ScoredLogprobs, position: int, numbers: TokenNumbers) -> dict[int, float]:
    """Return log probabilities by token: the window's own, and those of the list. Where several names mean one token,
    the likeliest counts."""
    own, listed = read.tokens[position], read.top_logprobs[position] or {}
    found: dict[int, float] = {}
    for name, logprob in [(own, read.token_logprobs[position]), *listed.items()]:
        if logprob is None or math.isnan(logprob):
            raise JaxserveError(
                f"token {position} of a window, {own!r}, has NaN as a log probability: the model computes no valid "
                "logits"
            )
        number = numbers.number(name)
        found[number] = max(logprob, found.get(number, -math.inf))
    return found
