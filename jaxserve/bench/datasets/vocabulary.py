"""Draws random tokens, and random texts that a server will tokenize to the same length.

Texts are made of tokens that are whole words after a space. Any BPE tokenizer that splits at spaces cuts such a text
into the same tokens again, so it has the length asked for. Without a tokenizer only ids can be drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_CANDIDATES = 8192
_MIN_WORDS = 64
_ROUNDS = 8
_DOUBLED_WORD = re.compile(r" ?([^\W\d_]+) \1")


class Vocabulary:
    """Draws from a tokenizer's ordinary tokens, or, without a tokenizer, from the ids below `size`.

    `chat` says that texts become messages of chats, to which the tokenizer adds neither BOS nor EOS.
    """

    def __init__(self, tokenizer: Tokenizer | None, size: int | None = None, *, chat: bool = False) -> None:
        if size is not None and size < 1:
            raise ConfigError(f"--vocab-size must be at least 1, got {size}")
        self._tokenizer = tokenizer
        self._chat = chat
        self._size = size or (tokenizer.vocab_size if tokenizer else None)
        self._words: np.ndarray | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `ConfigError` when there is none."""
        if self._tokenizer is None:
            raise ConfigError("this dataset needs the model's tokenizer: name it with --tokenizer")
        return self._tokenizer

    @property
    def can_count(self) -> bool:
        """Whether there is a tokenizer, which counts the tokens of texts."""
        return self._tokenizer is not None

    @property
    def added(self) -> int:
        """The number of tokens (BOS, EOS) that the tokenizer adds to every text; none in chats."""
        return 0 if self._chat else len(self.tokenizer.encode(""))

    def ids(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw `count` ids of ordinary tokens."""
        if self._size is None:
            raise ConfigError("random ids need the size of the vocabulary: name a --tokenizer, or give --vocab-size")
        skipped = self._tokenizer.skipped_ids if self._tokenizer else frozenset[int]()
        drawn: list[int] = rng.integers(self._size, size=count).tolist()
        return [self._redraw(rng, token) if token in skipped else token for token in drawn]

    def _redraw(self, rng: np.random.Generator, token: int) -> int:
        assert self._size is not None
        while token in self.tokenizer.skipped_ids:
            token = int(rng.integers(self._size))
        return token

    def words(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw `count` ids of tokens that stay separate tokens within a text."""
        if self._words is None:
            self._words = self._find_words()
        drawn: list[int] = rng.choice(self._words, size=count).tolist()
        return drawn

    def text(self, rng: np.random.Generator, ids: Sequence[int]) -> tuple[str, int]:
        """Return the ids as text, and the number of tokens of that text without BOS and EOS.

        Tokens are removed or added at the end until the text has as many tokens as `ids`, if the tokenizer allows it.
        """
        wanted, current = len(ids), list(ids)
        text = self.tokenizer.decode(current)
        for _ in range(_ROUNDS):
            current = self.tokenizer.encode(text, add_special_tokens=False)
            if len(current) == wanted:
                break
            current = current[:wanted] + self.words(rng, max(wanted - len(current), 0))
            text = self.tokenizer.decode(current)
        return text, self.count_answer(text)

    def count(self, text: str) -> int:
        """Count the tokens of a text as a server does, with BOS and EOS except in chats."""
        return len(self.tokenizer.encode(text, add_special_tokens=not self._chat))

    def count_answer(self, text: str) -> int:
        """Count the tokens of a text as the model wrote it, without BOS and EOS."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def _find_words(self) -> np.ndarray:
        tokenizer = self.tokenizer
        rng = np.random.default_rng(0)
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), np.array(sorted(tokenizer.skipped_ids), dtype=int))
        candidates = rng.choice(ordinary, size=min(_CANDIDATES, len(ordinary)), replace=False).tolist()
        texts = {token: tokenizer.decode([token, token]) for token in candidates}
        doubled = [(token, text) for token, text in texts.items() if _DOUBLED_WORD.fullmatch(text)]
        encoded = tokenizer.encode_batch([text for _, text in doubled], add_special_tokens=False) if doubled else []
        words = [token for (token, _), ids in zip(doubled, encoded) if ids == [token, token]]
        return np.array(sorted(words)) if len(words) >= _MIN_WORDS else ordinary
