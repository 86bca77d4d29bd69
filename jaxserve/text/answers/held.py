"""The grammar of a whole answer: what a client asks for comes after the reasoning, and in the channel for it."""

from __future__ import annotations

import json
import re

from jaxserve.text.answers.formats import HARMONY, AnswerFormats
from jaxserve.text.answers.harmony import CHANNEL, END, MESSAGE, START
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_ANY = r"/(.|\n)*/"


def whole_answer(grammar: str, formats: AnswerFormats, tokenizer: Tokenizer, *, inside: bool) -> str:
    """Return the grammar of an answer that is in `grammar` after reasoning, which may be left out unless the answer
    begins `inside` of it."""
    if formats.reasoning == HARMONY:
        start, channel, message, end = (_mark(text, tokenizer) for text in (START, CHANNEL, MESSAGE, END))
        lark = (
            "start: analysis? final\n"
            f'analysis: {channel} "analysis" {message} {_ANY} {end} {start} "assistant"\n'
            f'final: {channel} "final" {message} @answer\n'
        )
    elif (thinking := formats.thinking) is not None:
        lark = f"start: {'thinking' if inside else 'thinking?'} @answer\nthinking: reasoning /\\s{{0,2}}/\n"
        special = [text for text in thinking.ends if tokenizer.special_id(text) is not None]
        begins = "" if inside else f" ({' | '.join(_mark(text, tokenizer) for text in thinking.begins)})"
        if special:
            lark += f"reasoning:{begins} {_ANY} ({' | '.join(_mark(text, tokenizer) for text in special)})\n"
        else:
            ends = "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in thinking.ends)
            lark += f"reasoning:{begins} rest\nrest[lazy]: /(.|\\n)*({ends})/\n"
    else:
        return grammar
    return _with_parts(lark, answer=grammar)


def either(one: str, other: str) -> str:
    """Return the grammar of an answer that is in one of two."""
    return _with_parts("start: @one | @other\n", one=one, other=other)


def _with_parts(lark: str, **grammars: str) -> str:
    """Return the grammar `lark`, in which others, in JSON or in Lark, have names."""
    parts: list[dict[str, object]] = [{"lark_grammar": lark}]
    for name, grammar in grammars.items():
        is_lark = not grammar.startswith("{")
        first, *others = [{"lark_grammar": grammar}] if is_lark else json.loads(grammar)["grammars"]
        parts += [{**first, "name": name}, *others]
    return json.dumps({"grammars": parts})


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """Return a mark as Lark has it: a token if it is a special one, else its text."""
    special = tokenizer.special_id(text)
    return json.dumps(text) if special is None else f"<[{special}]>"
