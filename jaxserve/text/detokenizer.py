"""Text from a stream of token ids, as early as it is certain and never half a character.

The cost of a token doesn't depend on how much came before it.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence

from jaxserve.text.tokenizer import Tokenizer

_CONTEXT = 4  # a character has at most 4 bytes, so its start lies at most 3 tokens back


class IncrementalDetokenizer:
    """The texts of all pushes and of the flush, joined, are the decoded output, however the ids are cut into pushes.

    The output continues the prompt: it keeps the space that SentencePiece would strip from the start of a text, and
    completes a character whose first bytes the prompt ended with. Bytes that are no UTF-8 become U+FFFD at most two
    bytes after it is certain that nothing can make them valid.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.skipped_ids if skip_special_tokens else frozenset[int]()
        shown = (token_id for token_id in reversed(prompt_ids) if self._is_shown(token_id))
        self._context = list(itertools.islice(shown, _CONTEXT))[::-1]
        self._at_start = not self._context
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if self._pieces is not None:
            pieces = self._pieces
            self._utf8.decode(b"".join([pieces[token_id] for token_id in self._context]))

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.has_token(token_id)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens make certain."""
        pieces = self._pieces
        if pieces is None:
            return self._push_without_pieces([token_id for token_id in ids if self._is_shown(token_id)])
        text = self._utf8.decode(b"".join([pieces[token_id] for token_id in ids if token_id not in self._skipped]))
        if self._at_start and text:
            self._at_start = False
            if pieces.strips_leading_space:
                return text.removeprefix(" ")
        return text

    def _push_without_pieces(self, shown: list[int]) -> str:
        # What a token adds can depend on those before it (a space between words), so it is decoded after a few of them
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._context + shown
        self._context = both[-_CONTEXT:]
        return self._tokenizer.decode(both, skip_special_tokens=False)[len(before) :]

    def num_broken_off(self, token_id: int) -> int:
        """How many characters of the text of the next push, of this token, are not its own: 1 where bytes held back
        turn out to be no UTF-8, since it does not go on with them, else 0."""
        if self._pieces is None or token_id in self._skipped:
            return 0
        held, first = self._utf8.getstate()[0], self._pieces[token_id][:1]
        if not held or not first:
            return 0
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(held + first)
        except UnicodeDecodeError:
            return 1
        return 0

    def flush(self) -> str:
        """What was held back: U+FFFD if the output ends inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)
