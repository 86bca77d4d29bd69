"""The format of gpt-oss: messages in channels, of which `final` is for the reader and `analysis` is reasoning."""

from __future__ import annotations

import re

from jaxserve.text.answers.json_text import is_object
from jaxserve.text.answers.reader import Kind, Reader, Steps

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_ENDS = (END, "<|return|>", "<|call|>")
MARKS = (START, CHANNEL, MESSAGE, *_ENDS)
# What follows the text of a message.
AFTER_TEXT = (*_ENDS, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]{1,256})")
# The beginning of a header, as a limit of tokens may leave it.
_CUT_HEADER = re.compile(r"(<\|start\|>\w*)?[\w\s=.]*(<\|channel\|>)?[\w\s=.]*")


def harmony(reader: Reader) -> Steps[None]:
    """Take an answer apart that begins after `<|start|>assistant`. Text outside of messages is content."""
    mark, shown = "", set[Kind]()
    while True:
        if mark not in (START, CHANNEL):
            _, mark = yield from reader.copy("content", *MARKS)
            if not mark:
                return
            if mark in _ENDS:
                continue
        header = mark
        if mark != MESSAGE:
            rest, found = yield from reader.take_until(MESSAGE)
            header += rest
            if not found:
                reader.add("content", "" if _CUT_HEADER.fullmatch(header) else header)
                return
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and "to=functions." in recipient[0]:
            body = yield from reader.take_space()
            body += (yield from reader.take_json()) or ""  # marks within JSON are no marks
            rest, mark = yield from reader.take_until(*AFTER_TEXT)
            body += rest
            arguments = body.strip() or "{}"
            if is_object(arguments):
                reader.add_call(recipient[1], arguments)
            else:
                reader.add("content", body)
            continue
        for_reader = recipient is None and (channel is None or channel[1] != "analysis")
        kind: Kind = "content" if for_reader else "reasoning"
        if kind in shown:
            reader.add(kind, "\n")
        shown.add(kind)
        if kind == "reasoning":
            reader.begin_reasoning()
        _, mark = yield from reader.copy(kind, *AFTER_TEXT)
        if kind == "reasoning" and mark:
            reader.end_reasoning()
