"""The vocabulary of a tokenizer as llguidance needs it: the bytes of every token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The bytes of the tokens by id, those that end an output, and those that stand for no text."""

    tokens: list[bytes]
    eos_ids: list[int]
    bos_id: int | None
    special_ids: list[int]


def tokens_of(tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of a tokenizer. The interpreter lock is held for about 5 us a token."""
    special = tokenizer.skipped_ids.union(tokenizer.eos_ids)
    size = 1 + max((tokenizer.vocab_size - 1, *special))
    tokens = [tokenizer.token_bytes(index) if tokenizer.has_token(index) else b"" for index in range(size)]
    return Tokens(tokens, list(tokenizer.eos_ids), tokenizer.bos_id, sorted(special))


def make_vocabulary(tokens: Tokens, encode: Callable[[str], list[int]]) -> LLTokenizer:
    """Return llguidance's vocabulary. `encode` returns the ids of a text, without special tokens around it."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    eos = tokens.eos_ids or [len(tokens.tokens)]  # beyond the vocabulary: nothing ends the output
    return LLTokenizer(TokenizerWrapper(_Wrapped(tokens, eos[0], encode)), eos_token=eos, n_vocab=len(tokens.tokens))


def load_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Return llguidance's vocabulary of a tokenizer.

    It encodes forced text as the tokenizer does within a text, but never as a special token. A text that is spelled
    like one is written in llguidance's own longest tokens, as is a text to which the tokenizer would add anything, as
    SentencePiece adds a blank before it.
    """
    tokens = tokens_of(tokenizer)
    special = frozenset(tokens.special_ids)

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for index in tokenizer.encode(text, add_special_tokens=False):
            spelled = tokens.tokens[index].decode(errors="replace") if index in special else ""
            ids += vocabulary.greedy_tokenize(spelled) if spelled else [index]
        if b"".join(tokens.tokens[index] for index in ids) == text.encode():
            return ids
        return list(vocabulary.greedy_tokenize(text))

    vocabulary = make_vocabulary(tokens, encode)
    return vocabulary


class _Wrapped:
    """A vocabulary in the form of llguidance's `TokenizerWrapper`."""

    def __init__(self, tokens: Tokens, eos_id: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens.tokens
        self.eos_token_id = eos_id
        self.bos_token_id = tokens.bos_id
        self.special_token_ids = tokens.special_ids
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)
