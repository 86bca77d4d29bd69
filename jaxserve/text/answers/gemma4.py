"""Gemma 4's calls: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,{a:true}]}<tool_call|>` for each."""

from __future__ import annotations

import json
import re

from jaxserve.text.answers.json_text import is_object, json_type, skip_space
from jaxserve.text.answers.reader import Reader, Steps

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL = re.compile(r"\s*call:([\w.\-/]{1,256})\s*(?=\{)")
# A text between Gemma's quotes, one between JSON's quotes, a bracket, comma or colon, or anything else.
_PART = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|\s*([{}\[\],:])\s*|((?:<(?!\|"\|>)|[^<{}\[\],:])+)', re.DOTALL
)


def gemma4(reader: Reader) -> Steps[None]:
    """Read calls between their marks; any other text between marks is content."""
    while True:
        blanks, mark = yield from reader.copy("content", BEGIN)
        if not mark:
            return
        body, ended = yield from reader.take_until(END)
        call = _CALL.match(body)
        arguments = "" if call is None else _json(body[call.end() :].strip())
        if call is not None and is_object(arguments):
            reader.add_call(call[1], arguments)
        else:
            reader.add("content", blanks + mark + body + ended)


def _json(text: str) -> str:
    """Return a value of Gemma's notation as JSON; if it isn't one, the result is no JSON."""
    found = []
    at = 0
    for part in _PART.finditer(text):
        if part.start() != at:  # a quote without its end
            return ""
        at = part.end()
        quoted, in_json, form, other = part.groups()
        if quoted is not None:
            found.append(json.dumps(quoted, ensure_ascii=False))
        elif form is not None:
            found.append(form + " " * (form in ",:"))
        elif in_json is not None:
            found.append(in_json)
        else:
            word = other.strip()
            is_name = text.startswith(":", skip_space(text, at))
            found.append(word if not is_name and json_type(word) is not None else json.dumps(word, ensure_ascii=False))
    return "".join(found)
