"""One answer: its text in, its reasoning, content and calls out."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.text.answers.reader import Format, Parser, Part


class Answer:
    """Takes an answer apart by several formats, each of which reads what is content to the one before."""

    def __init__(self, formats: Sequence[Format]) -> None:
        self._parsers = [Parser(format) for format in formats]

    @property
    def reasoning_end(self) -> int:
        """The number of characters up to the end of the reasoning; more than there are before that."""
        return max((parser.reasoning_end for parser in self._parsers), default=0)

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Return the parts that `text` adds; with `last`, also those that were held back."""
        parts = [Part("content", text)] if text else []
        for parser in self._parsers:
            found: list[Part] = []
            for part in parts:
                found += parser.push(part.text) if part.kind == "content" else [part]
            parts = found + parser.push("", last=True) if last else found
        return parts


def whole(formats: Sequence[Format], text: str) -> list[Part]:
    """Return the parts of a whole answer, neighbours of one kind joined."""
    joined: list[Part] = []
    for part in Answer(formats).push(text, last=True):
        if joined and joined[-1].kind == part.kind and part.kind != "call":
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
