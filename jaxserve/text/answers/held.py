"""The grammar of a whole answer: the form that a client asks for comes after the reasoning, in the channel for it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.text.answers.formats import AnswerFormats
from jaxserve.text.answers.harmony import CHANNEL, END, MARKS, MESSAGE, START
from jaxserve.text.grammars.json_grammar import JsonGrammar
from jaxserve.text.grammars.lark import any_of, lark_text, with_parts, without
from jaxserve.text.tokenizers.tokenizer import Tokenizer


def whole_answer(grammar: str, formats: AnswerFormats, tokenizer: Tokenizer, *, inside: bool) -> str:
    """Return the grammar of an answer that is in `grammar` after reasoning, which may be left out unless the answer
    begins `inside` of it."""
    if formats.reasoning is None:
        return grammar
    thinking = formats.reasoning.marks
    if thinking is None:
        return channels_grammar(grammar, {}, tokenizer, required=False)
    lark = f"start: {'thinking' if inside else 'thinking?'} @answer\nthinking: reasoning /\\s{{0,2}}/\n"
    special = [text for text in thinking.ends if tokenizer.special_id(text) is not None]
    begins = "" if inside else f" ({' | '.join(lark_text(text, tokenizer) for text in thinking.begins)})"
    if special:
        lark += f"reasoning:{begins} TEXT ({' | '.join(lark_text(text, tokenizer) for text in special)})\n"
        lark += f"TEXT: {without(thinking.ends)}\n"
    else:
        lark += f"reasoning:{begins} rest\nrest[lazy]: /(?s:.*)({any_of(thinking.ends)})/\n"
    return with_parts(lark, answer=grammar)


def channels_grammar(
    form: str, tools: Mapping[str, Any], tokenizer: Tokenizer, *, required: bool, strict: Collection[str] = ()
) -> str:
    """Return the grammar of an answer of gpt-oss, which may begin with analysis: a final message in the grammar `form`,
    or any if that is "", or a call of one of `tools`; with `required`, only such a call. Schemas of tools in `strict`
    are held whole, or not at all. Raises `ValueError` for what can't be held."""
    start, channel, message, end = (lark_text(text, tokenizer) for text in (START, CHANNEL, MESSAGE, END))
    constrain = lark_text("<|constrain|>", tokenizer)
    answers = [] if required else ["final"]
    answers += [f"call_{number}" for number in range(len(tools))]
    lark = f'start: analysis? ({" | ".join(answers)})\nanalysis: {channel} "analysis" {message} TEXT {end} '
    lark += f'{start} "assistant"\nTEXT: {without(MARKS)}\n'
    if not required:
        lark += f'final: {channel} "final" {message} {"@answer" if form else "TEXT"}\n'
    grammar = JsonGrammar()
    for number, (name, schema) in enumerate(tools.items()):
        to = json.dumps(f"commentary to=functions.{name} ")
        arguments = grammar.add(schema, name=name, strict=name in strict, objects_only=True)
        lark += f'call_{number}: {channel} {to} {constrain} "json" {message} {arguments}\n'
    lark += "\n".join([*grammar.lines, ""])
    return with_parts(lark, **({"answer": form} if form and not required else {}))


def either(one: str, other: str) -> str:
    """Return the grammar of an answer that is in one of two."""
    return with_parts("start: @one | @other\n", one=one, other=other)
