"""Reads a text that arrives in pieces as if it were all there: formats are written as generators over a `Reader`.

A format looks at the text from its start to its end and says what it is: reasoning, content, calls. Whenever it needs
text that isn't there yet, it yields. What it says depends on the text only, never on where it was cut. Text that could
still become a mark of the format is held back.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Literal, NamedTuple

from jaxserve.text.answers.json_text import follow, json_type

Kind = Literal["reasoning", "content", "call", "arguments"]

# Each JSON text that never ends is read to the end of the answer: after this many, the rest is content.
_MAX_UNCLOSED = 16
_SPACE = re.compile(r"\s*")


class Part(NamedTuple):
    """A part of an answer. `call` is the name of a function; its `arguments` follow, as pieces of one JSON text."""

    kind: Kind
    text: str


type Steps[T] = Generator[None, None, T]
type Format = Callable[[Reader], Steps[None]]


class Reader:
    """The text that has arrived and was not read yet, and the parts found so far.

    `reasoning_end` is the number of characters up to the end of the reasoning: 0 without any, and more than any text
    has while it goes on.
    """

    def __init__(self) -> None:
        self.has_calls = False
        self.reasoning_end = 0
        self._parts: list[Part] = []
        self._text = ""
        self._ended = False
        self._num_read = 0
        self._num_unclosed = 0

    def feed(self, text: str, *, last: bool = False) -> None:
        """Add text that has arrived."""
        self._text += text
        self._ended = last

    def add(self, kind: Kind, text: str) -> None:
        """Add a part."""
        if text:
            self._parts.append(Part(kind, text))

    def add_call(self, name: str, arguments: str) -> None:
        """Add a whole call."""
        self.has_calls = True
        self._parts += (Part("call", name), Part("arguments", arguments))

    def begin_reasoning(self) -> None:
        """Count the text read from here on as reasoning."""
        self.reasoning_end = sys.maxsize

    def end_reasoning(self) -> None:
        """End the reasoning where the text read so far ends."""
        self.reasoning_end = self._num_read

    def take_parts(self) -> list[Part]:
        """Return the parts added since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def copy(self, kind: Kind, *marks: str) -> Steps[tuple[str, str]]:
        """Add the text before the first of `marks` as parts, and read it and the mark; without one, all the text.

        The blanks directly before a mark are not added, nor those at the end of an answer with calls. Returns the
        blanks and the mark, or two empty texts.
        """
        while True:
            found = _any_of(marks).search(self._text) if marks else None
            end = len(self._text) if found is None else found.start()
            if found is None and not self._ended:
                end -= _held_back(self._text, marks)
            shown = end
            if (marks and (found is not None or not self._ended)) or (self._ended and self.has_calls):
                shown = len(self._text[:end].rstrip())
            self.add(kind, self._text[:shown])
            if found is not None:
                blanks = self._text[shown:end]
                self._drop(found.end())
                return blanks, found[0]
            self._drop(shown)
            if self._ended:
                return "", ""
            yield

    def take_until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Read the text before the first of `marks`, and the mark; without one all the text, and an empty mark."""
        start = 0
        while True:
            found = _any_of(marks).search(self._text, start) if marks else None
            if found is not None:
                before = self._text[: found.start()]
                self._drop(found.end())
                return before, found[0]
            if self._ended:
                before = self._text
                self._drop(len(before))
                return before, ""
            start = max(0, len(self._text) - max(map(len, marks), default=0) + 1)
            yield

    def take_space(self) -> Steps[str]:
        """Read blanks and line feeds, as far as they go."""
        while True:
            found = _SPACE.match(self._text)
            assert found is not None
            if found.end() < len(self._text) or self._ended:
                self._drop(found.end())
                return found[0]
            yield

    def take(self, *texts: str) -> Steps[str]:
        """Read the first of `texts` that comes next, or nothing: then an empty text is returned."""
        while True:
            for text in texts:
                if self._text.startswith(text):
                    self._drop(len(text))
                    return text
            if self._ended or not any(text.startswith(self._text) for text in texts):
                return ""
            yield

    def starts(self, pattern: re.Pattern[str], beginning: re.Pattern[str]) -> Steps[re.Match[str] | None]:
        """Return the match of `pattern` at the text's start, or None; read nothing.

        As long as all the text matches `beginning`, more of it may change the match.
        """
        while not self._ended and beginning.fullmatch(self._text) is not None:
            yield
        return pattern.match(self._text)

    def take_json(self) -> Steps[str | None]:
        """Read the JSON object or list that comes next; None if there is none: then nothing is read."""
        while not self._text and not self._ended:
            yield
        if not self._text.startswith(("{", "[")) or self._num_unclosed > _MAX_UNCLOSED:
            return None
        at = depth = 0
        in_string = False
        while True:
            at, depth, in_string = follow(self._text, at, depth, in_string)
            if not depth:
                value = self._text[:at]
                if json_type(value) is None:
                    return None
                self._drop(at)
                return value
            if self._ended:
                self._num_unclosed += 1
                return None
            yield

    def copy_json(self, kind: Kind) -> Steps[None]:
        """Add the JSON object that comes next as parts, as far as it goes, and read it."""
        while not self._text and not self._ended:
            yield
        depth, in_string = 0, False
        while self._text.startswith("{") or depth:
            at, depth, in_string = follow(self._text, 0, depth, in_string)
            self.add(kind, self._text[:at])
            self._drop(at)
            if not depth or self._ended:
                return
            yield

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._num_read += count


class AnswerParser:
    """Takes one answer apart by a format. Push its text in pieces of any size, of which one is the last."""

    def __init__(self, format: Format) -> None:
        self._reader = Reader()
        self._steps = format(self._reader)

    @property
    def reasoning_end(self) -> int:
        """See `Reader`."""
        return self._reader.reasoning_end

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Return the parts that `text` adds."""
        self._reader.feed(text, last=last)
        next(self._steps, None)
        return self._reader.take_parts()


@functools.cache
def _any_of(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _held_back(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may begin one of `marks`."""
    if not marks:
        return 0
    longest, beginning = _beginning_of(marks)
    found = beginning.search(text, max(0, len(text) - longest))
    return 0 if found is None else len(text) - found.start()


@functools.cache
def _beginning_of(marks: Sequence[str]) -> tuple[int, re.Pattern[str]]:
    """Return the most characters that a part of a mark has, and the pattern of a part at the end of a text."""
    beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
    return max(map(len, marks)) - 1, re.compile(rf"(?:{'|'.join(map(re.escape, beginnings))})\Z")
