"""Keeps special tokens that are spelled in the texts of a conversation from becoming control tokens of its prompt.

`escape` puts a placeholder, a character of private use, where a text spells a special token; a chat template passes it
on. `encode_batch` encodes the rendered prompt, in which only the template's own special tokens are spelled any more,
with the ordinary tokens of what was spelled for each placeholder.

A text may also end with the beginning of a spelling that the next one continues. Then its first character becomes a
placeholder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts

_FIRST_PLACEHOLDER = 0xF0000
# A search through this many characters holds the interpreter lock for some milliseconds.
_PIECE = 2**16


class EscapedMarks:
    """The special tokens of a tokenizer in texts. Raises `ConfigError` for a tokenizer that has no bytes of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.byte_table is None:
            raise ConfigError(
                "escape_marks needs a tokenizer with byte-level BPE or byte fallback, which this model's is not"
            )
        marks = sorted(tokenizer.special_texts(), key=len, reverse=True)
        spelled = list(dict.fromkeys([*marks, *(mark[0] for mark in marks)]))
        self._placeholders = {text: chr(_FIRST_PLACEHOLDER + index) for index, text in enumerate(spelled)}
        self._spelled = {placeholder: text for text, placeholder in self._placeholders.items()}
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._beginnings = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._private = re.compile("[" + "".join(self._spelled) + "]" if spelled else "(?!)")
        self._tokenizer = _with_special_tokens(tokenizer, list(self._spelled))
        self._ordinary = {
            self._tokenizer.special_id(placeholder): tokenizer.ordinary_ids(text)
            for placeholder, text in self._spelled.items()
        }

    def escape(self, value: Any) -> Any:
        """Return a value of JSON with escaped texts. Raises `InvalidRequestError` if one has a placeholder itself."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, Mapping):
            return {self.escape(name): self.escape(inner) for name, inner in value.items()}
        return [self.escape(inner) for inner in value] if isinstance(value, list | tuple) else value

    def restore(self, text: str) -> str:
        """Return what an escaped text spells."""
        return self._private.sub(lambda found: self._spelled[found[0]], text)

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_count: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Return the ids of escaped texts, as `Tokenizer.encode_batch` does."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens, check_count=check_count)
        return [self._expand(ids) for ids in encoded]

    def min_num_tokens(self, text: str) -> int:
        """Return what `Tokenizer.min_num_tokens` does for an escaped text."""
        return self._tokenizer.min_num_tokens(text)

    def _escape_text(self, text: str) -> str:
        if self._private.search(text):
            raise InvalidRequestError(
                f"messages: a text has a character of private use (U+{_FIRST_PLACEHOLDER:X} or above), which "
                "escape_marks uses itself",
                param="messages",
            )
        text = self._replace_marks(text)
        kept = text.rstrip()
        for size in range(min(self._longest, len(kept)), 0, -1):
            if kept[-size:] in self._beginnings:
                at = len(kept) - size
                return text[:at] + self._placeholders[text[at]] + text[at + 1 :]
        return text

    def _replace_marks(self, text: str) -> str:
        parts, at = list[str](), 0
        while at < len(text):
            end = at + _PIECE
            found = self._marks.search(text, at, end + self._longest)
            if found is None or found.start() >= end:
                parts.append(text[at:end])
                at = end
            else:
                parts += (text[at : found.start()], self._placeholders[found[0]])
                at = found.end()
        return "".join(parts)

    def _expand(self, ids: list[int]) -> list[int]:
        if self._ordinary.keys().isdisjoint(ids):
            return ids
        return [part for one in ids for part in self._ordinary.get(one, (one,))]


def _with_special_tokens(tokenizer: Tokenizer, texts: list[str]) -> Tokenizer:
    """Return a tokenizer with more special tokens. All of them are found as they are spelled, before the text around
    them is normalized: a text that only normalization turns into one is not found."""
    content = json.loads(tokenizer.to_json())
    for token in content["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in texts])
    return Tokenizer(TokenizerParts(backend, (), None, {}, {}))
