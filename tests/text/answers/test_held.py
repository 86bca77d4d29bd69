"""Answers that grammars hold, drawn at random, are read as calls whose arguments match their schemas."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.api_types import StructuredOutputs
from jaxserve.text.answers.formats import CALL_FORMATS, AnswerFormats
from jaxserve.text.answers.held import channels_grammar, either, whole_answer
from jaxserve.text.answers.held_calls import calls_grammar, free_calls_grammar, held_calls
from jaxserve.text.answers.reader import Part
from jaxserve.text.answers.reasoning import thinking
from jaxserve.text.grammars.custom.custom_text import CustomText
from jaxserve.text.grammars.formats import grammar_of
from jaxserve.text.grammars.vocabulary import load_vocabulary
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from tests.selection import examples
from tests.text.answers.parts import named, whole
from tests.text.grammars.custom.custom_grammars import GRAMMARS
from tests.text.grammars.draw import accepts
from tests.tiny_model import byte_tokenizer

SPECIAL = [
    *("<eos>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "</seed:think>", "[TOOL_CALLS]", "</arg_value>"),
    *("<|tool_call>", '<|"|>'),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
]
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"$ref": "#/$defs/Days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 14}},
    },
    "weather.now-1": {"type": "object", "properties": {}, "additionalProperties": False},
}
HERMES = named("hermes")
LIST = named("pythonic")
NATIVE = [named(name) for name in ("hermes", "granite", "phi4_mini_json", "mistral", "deepseek_v3")]
# What parameters that are written one at a time can ask for.
PARAMETERS: dict[str, Any] = {
    "search": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "What to find"},
            "kind": {"$ref": "#/$defs/Kind"},
            "count": {"type": "integer", "minimum": 3},
            "words": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "note": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
            "least": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 9}, {"type": "string"}]},
            "named": {"enum": ["5 x", "a b", 7, None, "</b>"]},
            "short": {"type": "string", "minLength": 2, "maxLength": 4},
            "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]?$"},
            "level": {"anyOf": [{"type": "string", "pattern": "^[0-9a-f]+$"}, {"type": "integer", "maximum": 5}]},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "minItems": 1},
            "tree": {"$ref": "#/$defs/Tree"},
            "day": {"oneOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "free": {},
        },
        "required": ["kind", "words"],
        "additionalProperties": False,
        "$defs": {
            "Kind": {"type": "string", "enum": ["web", "web page", "tool"]},
            "Tree": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 1}},
                "additionalProperties": False,
            },
            "Place": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 4}, "far": {"type": "boolean"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "wait": {
        "type": "object",
        "properties": {"hours": {"type": "integer"}, "minutes": {"type": "integer"}, "why": {"type": "string"}},
        "additionalProperties": False,
    },
}
BY_PARAMETER = [
    named(name) for name in ("qwen3_coder", "seed_oss", "minimax_m2", "glm45", "pythonic", "olmo3", "gemma4")
]
LLAMA = named("llama3_json")
FORM = StructuredOutputs(
    json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_tokenizer(*SPECIAL), (256,), None, {}, {}))


@functools.cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(tokenizer())


@functools.lru_cache(4096)
def allowed_tokens(mask: bytes) -> list[int]:
    return [token for token in range(256 + len(SPECIAL)) if mask[token // 8] >> token % 8 & 1]


def drawn(grammar: str, rng: random.Random, wanted: str = "", most: int = 600) -> str:
    """Return an output of a grammar: first the text `wanted`, then tokens that are drawn among those allowed."""
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    ids = tokenizer().encode(wanted, add_special_tokens=False)
    assert matcher.consume_tokens(ids), (matcher.get_error(), wanted)
    while not matcher.is_stopped() and len(ids) < most:
        ids.append(rng.choice(allowed_tokens(matcher.compute_bitmask())))
        assert matcher.consume_tokens(ids[-1:])
    assert matcher.is_stopped(), "it does not end"
    return tokenizer().decode([token for token in ids if token != 256], skip_special_tokens=False)


def check_calls(parts: list[Part], tools: dict[str, Any] = TOOLS) -> list[str]:
    """Return the functions that are called, after checking their arguments."""
    names = []
    for name, arguments in zip(parts[::2], parts[1::2], strict=True):
        assert (name.kind, arguments.kind) == ("call", "arguments"), parts
        jsonschema.validate(json.loads(arguments.text), tools[name.text])
        names.append(name.text)
    return names


def drawn_call(grammar: str, rng: random.Random, wanted: str, end: str) -> str:
    """Return an output of a grammar that begins as wanted and ends where it may.

    Where the text `end` is allowed, it is often taken: it ends texts that single bytes hardly ever would.
    """
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(wanted, add_special_tokens=False)
    assert matcher.consume_tokens(ids), wanted
    ending = tokenizer().encode(end, add_special_tokens=False)
    while not matcher.is_accepting() and len(ids) < 3000:
        if ending and rng.random() < 0.2:
            count = matcher.try_consume_tokens(ending)
            if count == len(ending):
                ids += ending
                continue
            matcher.rollback(count)
        ids.append(rng.choice(allowed_tokens(matcher.compute_bitmask())))
        assert matcher.consume_tokens(ids[-1:])
    assert matcher.is_accepting(), "it does not end"
    return tokenizer().decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("formats", [*NATIVE, LLAMA, LIST])
def test_held_calls_are_valid(formats: AnswerFormats):
    rng, form = random.Random(1), formats.calls.held
    several = calls_grammar(form, TOOLS, tokenizer(), several=True)
    one = calls_grammar(form, {"weather": TOOLS["weather"]}, tokenizer(), several=False)
    found = [check_calls(whole([held_calls(form)], drawn(several, rng, most=4000))) for _ in range(12)]
    assert {name for names in found for name in names} == set(TOOLS)
    assert max(map(len, found)) > 1
    for _ in range(4):
        assert check_calls(whole([held_calls(form)], drawn(one, rng))) == ["weather"]


@pytest.mark.parametrize("formats", [*NATIVE, LLAMA])
def test_held_calls_are_read_by_the_format_of_the_model_too(formats: AnswerFormats):
    form = formats.calls.held
    text = drawn(calls_grammar(form, TOOLS, tokenizer(), several=True), random.Random(2), most=4000)
    assert whole([formats.calls.read(TOOLS)], text) == whole([held_calls(form)], text)


@pytest.mark.parametrize("formats", NATIVE)
def test_calls_in_a_free_answer_are_valid(formats: AnswerFormats):
    form, rng = formats.calls.held, random.Random(6)
    grammar = free_calls_grammar(form, TOOLS, tokenizer(), several=True)
    for begin in ("", "Well <b> [x] "):
        text = drawn(grammar, rng, begin + form.opening + form.begin)
        content, *calls = whole([formats.calls.read(TOOLS)], text)
        if begin:
            assert content.text.startswith(begin.rstrip())
        assert len(check_calls((calls if begin else [content, *calls])[:2])) == 1


@pytest.mark.parametrize("formats", [*BY_PARAMETER, LLAMA], ids=lambda formats: formats.calls.name)
@pytest.mark.parametrize("free", [True, False])
def test_parameters_match_their_schemas(formats: AnswerFormats, free: bool):
    form, rng = formats.calls.free, random.Random(8)
    assert form.parameters is not None or formats is LLAMA
    end = form.parameters.quote + form.parameters.end if form.parameters is not None else ""
    make = free_calls_grammar if free else calls_grammar
    before = "Well, <b> " if free and form.marks else ""

    def draw(tools: dict[str, Any], name: str) -> set[str]:
        grammar = make(form, tools, tokenizer(), several=False)
        text = drawn_call(grammar, rng, before + form.opening + form.begin + name + form.middle, end)
        parts = whole([formats.calls.read(tools)], text)
        if before:
            assert parts.pop(0) == ("content", before.rstrip()), text
        assert check_calls(parts, tools) == [name], text
        return set(json.loads(parts[1].text))

    for name in PARAMETERS["search"]["properties"]:
        for _ in range(examples(30, 3)):
            draw({"search": PARAMETERS["search"] | {"required": [name]}}, "search")
    assert draw(PARAMETERS, "now") == set()
    assert len(set().union(*(draw(PARAMETERS, "wait") for _ in range(10)))) > 1


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (
            {"properties": {"a": {}}, "minProperties": 1},
            "f: minProperties can't be held in calls in the model's format",
        ),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "f: maxProperties can't be held in calls"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "f: alternatives of all arguments can't be held"),
        ({"properties": {"a": {"pattern": "(?=x)"}}}, "f: properties.a.pattern: looking ahead"),
        ({"properties": {"a": {"enum": ["5", 7]}}}, "f: a: calls in the model's format can't have '5' as a text"),
        ({"properties": {"a": {"const": "x</parameter>"}}}, "f: a: calls in the model's format can't have 'x</"),
        ({"properties": {"a b": {}}}, "f: a b: calls in the model's format can't have a parameter of this name"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, "f: properties.a.$ref: 'http://x/y' is not in this document"),
        ({"properties": {"a": {"anyOf": [3]}}}, "f: properties.a.anyOf.0: a JSON schema is an object, true or false"),
        ({"type": "string"}, "f: alternatives of all arguments can't be held"),
    ],
)
def test_what_parameters_cannot_ask_for_is_refused_by_name(schema: dict[str, Any], error: str):
    form = named("qwen3_coder").calls.free
    with pytest.raises(ValueError, match=re.escape(error)):
        free_calls_grammar(form, {"f": schema}, tokenizer(), several=True)


# Texts that hold marks of all formats, for grammars that have few others.
MARKS = """
start: "x" (MARK | "\\n" | "\\"")+
MARK: "</tool_call>" | "</parameter>" | "<parameter=" | "</function>" | "</arg_value>" | "</invoke>" | "<tool_call|>"
    | "<|tool_call>" | "</function_calls>" | "<｜tool▁call▁end｜>" | "<|python_end|>" | "[TOOL_CALLS]" | "<|end|>"
    | "</seed:tool_call>" | "</minimax:tool_call>" | "{" | "<|call|>" | "<|\\"|>" | "```" | "<|/tool_call|>"
"""
CUSTOM = [*(("lark", text) for text in (*GRAMMARS.values(), MARKS)), ("regex", r"[a-c]{2,}(\n?\w[^\s<]+){1,3}")]
CHANNELS = named("gpt_oss", "gpt_oss")


@pytest.mark.parametrize("formats", [*NATIVE, *BY_PARAMETER, LLAMA, CHANNELS], ids=lambda formats: formats.calls.name)
@pytest.mark.parametrize("free", [True, False])
def test_inputs_of_custom_tools_are_in_their_grammars(formats: AnswerFormats, free: bool):
    rng = random.Random(f"{formats.calls.name} {free}")
    for syntax, definition in rng.sample(CUSTOM, examples(len(CUSTOM), 4)):
        text = CustomText(syntax, definition)  # type: ignore[arg-type]
        tools = {
            "now": PARAMETERS["now"],
            "run": {
                "type": "object",
                "properties": {"input": text},
                "required": ["input"],
                "additionalProperties": False,
            },
        }
        if formats is CHANNELS:
            grammar = channels_grammar("", tools, tokenizer(), required=not free)
            wanted = "<|channel|>commentary to=functions.run "
        else:
            form = formats.calls.free
            make = free_calls_grammar if free else calls_grammar
            grammar = make(form, tools, tokenizer(), several=False)
            wanted = f"{'Well, ' if free and form.marks else ''}{form.opening}{form.begin}run{form.middle}"
        raw = LLMatcher.grammar_from_lark(definition) if syntax == "lark" else LLMatcher.grammar_from_regex(definition)
        for _ in range(examples(8, 1)):
            answer = drawn_custom(grammar, rng, wanted)
            parts = whole([formats.calls.read(tools)], answer)
            if answer.startswith("Well"):
                assert parts.pop(0) == ("content", "Well,"), answer
            name, arguments = parts
            assert name == ("call", "run"), answer
            given = json.loads(arguments.text)
            assert [*given] == ["input"], answer
            assert accepts(raw, given["input"]), (definition, answer)


def drawn_custom(grammar: str, rng: random.Random, wanted: str) -> str:
    """Return an output of a grammar that begins as wanted and ends soon: where texts often end, they are ended."""
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(wanted, add_special_tokens=False)
    assert matcher.consume_tokens(ids), wanted
    while not matcher.is_accepting():
        assert len(ids) < 20_000, "it does not end"
        allowed = allowed_tokens(matcher.compute_bitmask())
        often = [token for token in allowed if token > 256 or (token < 256 and chr(token) in '"\\nu03c*</}])')]
        ids.append(rng.choice(often if often and rng.random() < 0.5 else allowed))
        assert matcher.consume_tokens(ids[-1:])
    return tokenizer().decode(ids, skip_special_tokens=False)


def test_marks_within_json_are_no_marks():
    value = '["</parameter>", "</function>"]'
    text = f"<tool_call><function=search><parameter=words>{value}</parameter></function></tool_call>"
    assert whole([named("qwen3_coder").calls.read(PARAMETERS)], text) == [
        ("call", "search"),
        ("arguments", f'{{"words": {value}}}'),
    ]


@pytest.mark.parametrize("mark", ["</parameter>", "</function>", "</tool_call>", "</tool_call>" * 70])
def test_marks_within_the_input_of_a_custom_tool_are_no_marks(mark: str):
    tools = {"run": {"type": "object", "properties": {"input": CustomText("lark", "start: /(?s:.*)/")}}}
    value = json.dumps(f'if a < b: "{mark}"\n')
    text = f"<tool_call>\n<function=run>\n<parameter=input>\n{value}\n</parameter>\n</function>\n</tool_call>"
    parts = whole([CALL_FORMATS["qwen3_coder"].read(tools)], f"Well. {text}\n{text}")
    calls = [("call", "run"), ("arguments", f'{{"input": {value}}}')]
    if len(mark) < 100:
        assert parts == [("content", "Well."), *calls, *calls]
    else:  # so many are read as no call, and nothing is lost
        assert parts == [("content", f"Well. {text}\n{text}")]
    cut = text[: text.index(value) + 9]
    assert whole([CALL_FORMATS["qwen3_coder"].read(tools)], cut) == [("content", cut)]


def test_marks_within_the_arguments_of_a_message_are_no_marks():
    arguments = '{"input": "<|end|> <|start|>"}'
    header = "<|channel|>commentary to=functions.run <|constrain|>json<|message|>"
    for text in (f"{header}{arguments}<|call|>", f"{header}\n{arguments}"):
        assert whole([CHANNELS.calls.read({})], text) == [("call", "run"), ("arguments", arguments)]


def test_spelled_marks_begin_no_call_where_marks_are_tokens():
    """A text may spell a mark by other tokens, and is read as if it were one."""
    form = named("mistral").calls.free
    matcher = LLMatcher(vocabulary(), free_calls_grammar(form, TOOLS, tokenizer(), several=True), log_level=0)
    spelled = list(b"Ok [TOOL_CALLS]")
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1


def test_a_tag_in_free_text_begins_a_valid_call():
    grammar = free_calls_grammar(HERMES.calls.held, TOOLS, tokenizer(), several=True)
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    text = 'Well <b>, <tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call> and'
    assert matcher.consume_tokens(tokenizer().encode(text))
    assert matcher.is_accepting()
    matcher.reset()
    assert not matcher.consume_tokens(tokenizer().encode('<tool_call>\n{"name": "storm'))


def test_a_tag_after_reasoning_begins_a_valid_call():
    formats = named("hermes", "deepseek_r1")
    grammar = whole_answer(
        free_calls_grammar(HERMES.calls.held, TOOLS, tokenizer(), several=True), formats, tokenizer(), inside=True
    )
    text = '<tool_call>\n{"name": "storm</think>Ok <tool_call>\n{"name": "weather'
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert matcher.consume_tokens(tokenizer().encode(text)), matcher.get_error()
    assert not matcher.consume_tokens(tokenizer().encode("_"))


def test_a_form_or_calls():
    rng = random.Random(3)
    calls = calls_grammar(HERMES.calls.held, TOOLS, tokenizer(), several=False)
    grammar = either(grammar_of(FORM), calls)
    assert json.loads(drawn(grammar, rng, "{"))["a"] in (True, False)
    assert len(check_calls(whole([HERMES.calls.read(TOOLS)], drawn(grammar, rng, "<")))) == 1


@pytest.mark.parametrize(
    ("reasoning", "inside", "begin", "thought"),
    [
        ("deepseek_r1", False, "<think>a { </thin", "a { </thin"),
        ("deepseek_r1", False, "<think>", ""),
        ("deepseek_r1", True, "a { ", "a {"),
        ("granite", False, "Here is my thought process: x Here is", "x Here is"),
        ("seed_oss", True, "special ", "special"),
    ],
)
def test_a_form_begins_after_reasoning(reasoning: str, inside: bool, begin: str, thought: str):
    formats, rng = named("hermes", reasoning), random.Random(4)
    marks = formats.thinking
    assert marks is not None
    grammar = whole_answer(grammar_of(FORM), formats, tokenizer(), inside=inside)
    text = drawn(grammar, rng, begin + marks.ends[0])
    parts = whole([thinking(marks, inside=inside)], text)
    assert parts[0] == ("reasoning", thought) if thought else parts[0].kind == "content"
    assert json.loads(parts[-1].text)["a"] in (True, False)
    if not inside:
        assert json.loads(drawn(grammar, rng, "{"))["a"] in (True, False)


def test_a_form_is_in_the_final_channel_and_a_call_in_its_own():
    formats, rng = named("gpt_oss", "gpt_oss"), random.Random(5)
    for form in (grammar_of(FORM), ""):
        grammar = channels_grammar(form, {} if form else TOOLS, tokenizer(), required=not form)
        analysis = "<|channel|>analysis<|message|>hm { x<|end|>"
        for begin in (analysis, "<|channel|>final<|message|>" if form else "<|channel|>commentary"):
            parts = whole([formats.calls.read(TOOLS)], drawn(grammar, rng, begin))
            if begin is analysis:
                assert parts.pop(0) == ("reasoning", "hm { x")
            if form:
                assert json.loads(parts[0].text)["a"] in (True, False)
            else:
                assert len(check_calls(parts)) == 1


def test_a_free_answer_in_channels_may_be_a_call():
    rng = random.Random(7)
    for form in (grammar_of(FORM), ""):
        grammar = channels_grammar(form, TOOLS, tokenizer(), required=False)
        matcher = LLMatcher(vocabulary(), grammar, log_level=0)
        text = '{"a": true}' if form else "Any text"
        assert matcher.consume_tokens(tokenizer().encode(f"<|channel|>final<|message|>{text}"))
        assert matcher.is_accepting()
        called = drawn(grammar, rng, "<|channel|>commentary to=functions.weather ")
        assert check_calls(whole([named("gpt_oss", "gpt_oss").calls.read(TOOLS)], called)) == ["weather"]
