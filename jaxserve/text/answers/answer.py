"""Takes one answer apart, from its text into reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.text.answers.reader import AnswerParser, Format, Part


class Answer:
    """Takes an answer apart by several formats, each of which reads the content that the one before found."""

    def __init__(self, formats: Sequence[Format]) -> None:
        self._parsers = [AnswerParser(format) for format in formats]

    @property
    def reasoning_end(self) -> int:
        """The number of characters up to the end of the reasoning, as `Reader` counts them."""
        return max((parser.reasoning_end for parser in self._parsers), default=0)

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Return the parts that `text` adds. The text is the `last` of the answer, or more may follow."""
        parts = [Part("content", text)] if text else []
        for parser in self._parsers:
            found: list[Part] = []
            for part in parts:
                found += parser.push(part.text) if part.kind == "content" else [part]
            parts = found + parser.push("", last=True) if last else found
        return parts
