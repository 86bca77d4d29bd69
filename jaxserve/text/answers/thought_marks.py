"""Bounds reasoning by a number of tokens: the texts around it in the tokens of a model.

The engine counts reasoning by these, and knows no text itself. The readers of answers say what reasoning is; a test
compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.api_types import ThinkingBudget
from jaxserve.text.answers.formats import ReasoningFormat
from jaxserve.text.answers.harmony import AFTER_TEXT, CHANNEL, END, MESSAGE, START
from jaxserve.text.grammars.lark import MARK
from jaxserve.text.grammars.vocabulary import tokens_of
from jaxserve.text.tokenizers.tokenizer import Tokenizer

# All bytes of characters that a regular expression of texts calls `\s`.
_BLANK_BYTES = bytes(set("".join(char for char in map(chr, range(0x3001)) if char.isspace()).encode()))


@dataclass(frozen=True)
class ThoughtMarks:
    """The texts around reasoning and the tokens that have a part of one; `ThinkingBudget` explains all."""

    begins: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    once: bool
    fragments: dict[int, bytes]
    closings: tuple[tuple[int, ...], ...]
    num_begin_tokens: int

    def budget(self, num_tokens: int, *, inside: bool) -> ThinkingBudget:
        """Return the budget of an answer that begins `inside` of its reasoning, or before it."""
        return ThinkingBudget(
            num_tokens=num_tokens,
            inside=inside,
            once=self.once,
            begins=self.begins,
            ends=self.ends,
            fragments=self.fragments,
            closings=self.closings,
            num_begin_tokens=self.num_begin_tokens,
        )


def thought_marks(format: ReasoningFormat, tokenizer: Tokenizer, *, shows_special_tokens: bool) -> ThoughtMarks:
    """Return the marks of a model's reasoning. The interpreter lock is held for about 5 us a token of the vocabulary.

    Special tokens that texts of answers don't show have no bytes there.
    In channels, reasoning that is cut off is followed by the beginning of another message. If that is reasoning again,
    the message for the reader follows.
    """
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    if format.marks is None:
        begins, ends = (f"{CHANNEL}analysis{MESSAGE}",), AFTER_TEXT
        next_message = f"{END}{START}assistant"
        closings = [next_message, f"{next_message}{CHANNEL}final{MESSAGE}"]
    else:
        begins, ends = format.marks
        closings = [ends[0]]
    tokens = tokens_of(tokenizer).tokens
    if not shows_special_tokens:
        tokens = [b"" if index in tokenizer.skipped_ids else token for index, token in enumerate(tokens)]
    return make_marks(
        tokens,
        tuple(text.encode() for text in begins),
        tuple(text.encode() for text in ends),
        tuple(tuple(_encode(text, tokenizer)) for text in closings),
        once=format.marks is not None,
    )


def make_marks(
    tokens: Sequence[bytes],
    begins: tuple[bytes, ...],
    ends: tuple[bytes, ...],
    closings: tuple[tuple[int, ...], ...],
    *,
    once: bool,
) -> ThoughtMarks:
    """Return the marks in a vocabulary, the bytes of whose `tokens` are given by id."""
    fragments = _fragments(tokens, (*begins, *ends), blanks=once)
    fewest = min((_fewest_tokens(text, fragments) for text in begins), default=1)
    return ThoughtMarks(begins, ends, once, fragments, closings, fewest)


def _fragments(tokens: Sequence[bytes], texts: Sequence[bytes], *, blanks: bool) -> dict[int, bytes]:
    """Return the tokens that have a part of one of `texts`, or no bytes, and with `blanks` all that may be blank."""
    parts = {text[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    heads = tuple({text[:length] for text in texts for length in range(1, len(text) + 1)})
    rests = tuple({text[start:] for text in texts for start in range(len(text))})
    shortest = min(map(len, texts))
    return {
        index: token
        for index, token in enumerate(tokens)
        if not token
        or token in parts
        or token.endswith(heads)
        or token.startswith(rests)
        or (len(token) > shortest and any(text in token for text in texts))
        or (blanks and not token.translate(None, _BLANK_BYTES))
    }


def _fewest_tokens(text: bytes, fragments: Mapping[int, bytes]) -> int:
    """Return the fewest tokens in which an output gets `text`."""
    pieces, size = set(fragments.values()), len(text)
    if any(text in piece for piece in pieces):
        return 1
    fewest = [0 if not end else size for end in range(size + 1)]
    for end in range(size):
        first = {piece for piece in pieces if piece.endswith(text[:end])} if end else set[bytes]()
        reached = 1 if first else fewest[end]
        fewest[end] = min(fewest[end], reached)
        for piece in pieces:
            rest = text[end:]
            if piece.startswith(rest):
                fewest[size] = min(fewest[size], fewest[end] + 1)
            elif rest.startswith(piece):
                fewest[end + len(piece)] = min(fewest[end + len(piece)], fewest[end] + 1)
    return max(fewest[size], 1)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text, in which marks that are special tokens are these."""
    ids: list[int] = []
    for piece in filter(None, MARK.split(text)):
        special = tokenizer.special_id(piece)
        if special is not None:
            ids.append(special)
            continue
        found = tokenizer.encode(piece, add_special_tokens=False)
        written = b"".join(map(tokenizer.token_bytes, found))
        if written.strip() != piece.encode() and tokenizer.byte_table is not None:
            found = tokenizer.ordinary_ids(piece)  # the tokenizer changes texts
        ids += found
    return ids
