"""Decodes a stream of token ids: returns text as soon as it is certain, and never half a character.

The cost per token doesn't depend on the number of tokens before it.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence

from jaxserve.text.tokenizers.tokenizer import Tokenizer

_CONTEXT = 4  # a character has at most 4 bytes, so its start lies at most 3 tokens back


class IncrementalDetokenizer:
    """The decoder of one output. The joined texts of all pushes and the flush are the decoded output, however the ids
    are divided into pushes.

    The output continues the prompt: it keeps the space that SentencePiece would strip from the start of a text, and
    completes a character whose first bytes end the prompt. Invalid UTF-8 becomes U+FFFD, at most two bytes after it is
    certain that nothing can make it valid.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_table = tokenizer.byte_table
        self._skipped = tokenizer.skipped_ids if skip_special_tokens else frozenset[int]()
        shown = (token_id for token_id in reversed(prompt_ids) if self._is_shown(token_id))
        self._context = list(itertools.islice(shown, _CONTEXT))[::-1]
        self._at_start = not self._context
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if self._byte_table is not None:
            byte_table = self._byte_table
            self._utf8.decode(b"".join([byte_table[token_id] for token_id in self._context]))

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.has_token(token_id)

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is certain with them."""
        byte_table = self._byte_table
        if byte_table is None:
            return self._push_without_byte_table([token_id for token_id in ids if self._is_shown(token_id)])
        text = self._utf8.decode(b"".join([byte_table[token_id] for token_id in ids if token_id not in self._skipped]))
        if self._at_start and text:
            self._at_start = False
            if byte_table.strips_leading_space:
                return text.removeprefix(" ")
        return text

    def _push_without_byte_table(self, shown: list[int]) -> str:
        # A token's text can depend on the tokens before it (a space between words), so it is decoded together with them
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._context + shown
        self._context = both[-_CONTEXT:]
        return self._tokenizer.decode(both, skip_special_tokens=False)[len(before) :]

    def num_chars_from_held_bytes(self, token_id: int) -> int:
        """Return the number of characters that the next push, of this token, returns for held-back bytes: 1 if the
        token does not continue them, so that they become U+FFFD, else 0."""
        if self._byte_table is None or token_id in self._skipped:
            return 0
        held, first = self._utf8.getstate()[0], self._byte_table[token_id][:1]
        if not held or not first:
            return 0
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(held + first)
        except UnicodeDecodeError:
            return 1
        return 0

    def flush(self) -> str:
        """Return the held-back text: U+FFFD if the output ends inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)
