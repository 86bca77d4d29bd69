"""The parts of whole answers."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.text.answers.answer import Answer
from jaxserve.text.answers.formats import CALL_FORMATS, AnswerFormats, choose_formats
from jaxserve.text.answers.reader import Format, Part


def whole(formats: Sequence[Format], text: str) -> list[Part]:
    """Return the parts of an answer that comes in one piece."""
    return joined(Answer(formats).push(text, last=True))


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind joined."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].kind == part.kind and part.kind != "call":
            found[-1] = Part(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


def named(calls: str, reasoning: str | None = None) -> AnswerFormats:
    """Return the formats with these names, without reasoning by default."""
    if reasoning is None:
        return AnswerFormats(CALL_FORMATS[calls], None)
    return choose_formats("", calls=calls, reasoning=reasoning)
