"""Reasoning that a model writes before its answer, between two marks."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.text.answers.reader import Format, Reader, Steps


class Thinking(NamedTuple):
    """The marks that begin and end reasoning; some models know several."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]


THINK = Thinking(("<think>",), ("</think>",))
SEED_THINK = Thinking(("<seed:think>",), ("</seed:think>",))
GEMMA_THOUGHT = Thinking(("<|channel>thought",), ("<channel|>",))
GRANITE = Thinking(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)


def thinking(marks: Thinking, *, inside: bool, ended: bool = False) -> Format:
    """Return the format of an answer that begins with reasoning, or not; it begins `inside` if the prompt ends so.

    Blanks around reasoning belong to the marks, also if the prompt has `ended` it.
    """

    def read(reader: Reader) -> Steps[None]:
        blanks = yield from reader.take_space()
        begin = yield from reader.take(*marks.begins)
        if begin or inside:
            reader.begin_reasoning()
            yield from reader.take_space()
            _, end = yield from reader.copy("reasoning", *marks.ends)
            if not end:
                return
            reader.end_reasoning()
            blanks = ""
            yield from reader.take_space()
        reader.add("content", "" if ended else blanks)
        yield from reader.copy("content")

    return read
