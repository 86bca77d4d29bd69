"""Answers as models write them, and as they should be read, in pieces of any size."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError
from jaxserve.text.answers.answer import Answer
from jaxserve.text.answers.call_texts import CALL_LIST
from jaxserve.text.answers.formats import CALL_FORMATS, choose_formats
from jaxserve.text.answers.held_calls import held_calls
from jaxserve.text.answers.reader import Format, Part
from jaxserve.text.answers.reasoning import GEMMA_THOUGHT, GRANITE, THINK, thinking
from tests.text.answers.parts import joined, whole

TOOLS: dict[str, Any] = {
    "f": {
        "$defs": {"Count": {"type": "integer"}},
        "properties": {
            "a": {"$ref": "#/$defs/Count"},
            "s": {"type": "string"},
            "n": {"type": ["number", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "array"}]},
            "flag": {"type": "boolean"},
        },
    },
    "get.w": {},
}
CALL, MORE = ("call", "f"), ("call", "get.w")
GOOD = '{"name": "f", "arguments": {"a": 1}}'
ONE = ("arguments", '{"a": 1}')
EMPTY = ("arguments", "{}")
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"

CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("hermes", f"Yes.\n<tool_call>\n{GOOD}\n</tool_call>\n", [("content", "Yes."), CALL, ONE]),
    ("hermes", f"<tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call>", [CALL, ONE, CALL, ONE]),
    ("hermes", f"<tool_call>{GOOD}</tool_call> Done. ", [CALL, ONE, ("content", " Done.")]),
    (
        "hermes",
        '<tool_call>{"arguments": {"s": "</tool_call> \\" }{ é"}, "name": "f"}</tool_call>',
        [CALL, ("arguments", '{"s": "</tool_call> \\" }{ é"}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [CALL, ONE]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [CALL, EMPTY]),
    ("hermes", f"<tool_call>{GOOD}", [CALL, ONE]),
    ("granite", f"<|tool_call|>[{GOOD}, {GOOD}]", [CALL, ONE, CALL, ONE]),
    ("granite", f"<tool_call>{GOOD}</tool_call>", [CALL, ONE]),
    ("phi4_mini_json", f"<|tool_call|>[{GOOD}]<|/tool_call|>", [CALL, ONE]),
    ("mistral", f"Yes.[TOOL_CALLS] [{GOOD}]", [("content", "Yes."), CALL, ONE]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get.w[CALL_ID]ab[ARGS]{}', [CALL, ONE, MORE, EMPTY]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', [CALL, ONE]),
    (
        "deepseek_v3",
        f'x{SECTION}{BEGIN}function<｜tool▁sep｜>f\n```json\n{{"a": 1}}\n```{END}\n'
        f"{BEGIN}function<｜tool▁sep｜>get.w\n```json\n{{}}\n```{END}{SECTION_END}",
        [("content", "x"), CALL, ONE, MORE, EMPTY],
    ),
    ("deepseek_v3", f'{SECTION}{BEGIN}f<｜tool▁sep｜>{{"a": 1}}{END}{SECTION_END}', [CALL, ONE]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "get.w"}', [CALL, ONE, MORE, EMPTY]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [CALL, ONE]),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', [CALL, ONE]),
    ("pythonic", "[f(a=1), get.w()]", [CALL, ONE, MORE, EMPTY]),
    (
        "pythonic",
        "<|python_start|>[f(s='it\\'s', n=-1.5, either=[true, None, {'k': (1,)}])]<|python_end|>",
        [CALL, ("arguments", '{"s": "it\'s", "n": -1.5, "either": [true, null, {"k": [1]}]}')],
    ),
    (
        "qwen3_coder",
        "Ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n1\n < 2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get.w>\n</function>\n</tool_call>",
        [("content", "Ok"), CALL, ("arguments", '{"a": 1, "s": "1\\n < 2"}'), MORE, EMPTY],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=n>\nnull\n</parameter>\n<parameter=either>\n[1]\n<parameter=flag>True</function>",
        [CALL, ("arguments", '{"n": null, "either": [1], "flag": true}')],
    ),
    ("olmo3", "Ok. <function_calls>f(a=1)\nget.w()</function_calls>", [("content", "Ok."), CALL, ONE, MORE, EMPTY]),
    ("olmo3", '<function_calls>f(s="a\\nb", n=null)', [CALL, ("arguments", '{"s": "a\\nb", "n": null}')]),
    ("gemma4", "Ok.<|tool_call>call:f{a:1}<tool_call|>", [("content", "Ok."), CALL, ONE]),
    (
        "gemma4",
        '<|tool_call>call:f{s:<|"|>a, "b": {c} <|"|>,n:-1.5,either:[<|"|>x<|"|>,null,{k: true}]}<tool_call|>'
        "<|tool_call>call:get.w{}<tool_call|>",
        [
            CALL,
            ("arguments", '{"s": "a, \\"b\\": {c} ", "n": -1.5, "either": ["x", null, {"k": true}]}'),
            MORE,
            EMPTY,
        ],
    ),
    ("gemma4", '<|tool_call>call:f{"s": "a, b", n: north}', [CALL, ("arguments", '{"s": "a, b", "n": "north"}')]),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>",
        [CALL, ("arguments", '{"s": "x"}')],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="get.w">\n</invoke>\n</minimax:tool_call>',
        [CALL, ONE, MORE, EMPTY],
    ),
    (
        "glm45",
        "Ok\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>get.w</tool_call>",
        [("content", "Ok"), CALL, ONE, MORE, EMPTY],
    ),
    ("gpt_oss", f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hi", [("reasoning", "hm"), ("content", "Hi")]),
    (
        "gpt_oss",
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        [("reasoning", "hm"), CALL, ONE],
    ),
    (
        "gpt_oss",
        '<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>'
        '{"a": 1}',
        [("content", "Wait."), CALL, ONE],
    ),
    ("gpt_oss", "Just text", [("content", "Just text")]),
    ("gpt_oss", f"{ANALYSIS}<|start|>assist", [("reasoning", "hm")]),
]  # fmt: skip
MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    ("hermes", "<tool_call>{bad}</tool_call> x"),
    ("hermes", '<tool_call>\n{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 100_000),
    ("hermes", '<tool_call>{ "a": ' * 4000),
    ("hermes", " a <tool_cal"),
    ("mistral", "a [TOOL_CALLS]f[ARGS]oops"),
    ("mistral", "[TOOL_CALLS][]"),
    ("deepseek_v3", f"{SECTION}{BEGIN}f<｜tool▁sep｜>{{{END}{SECTION_END}"),
    ("deepseek_v3", f"{SECTION}\n then {BEGIN}"),
    ("llama3_json", ' {"a": 1} is JSON'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", 'Then {"name": "f", "parameters": {}}'),
    ("pythonic", "[1, 2] is a list"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(a=1)] and more"),
    ("pythonic", "[f(a={1, 2})]"),
    ("pythonic", "[f(a=" + "(" * 3000),
    ("qwen3_coder", "<tool_call>\nf(1)\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nno parameter\n</function>\n</tool_call>"),
    ("olmo3", "<function_calls>f(a=1)\na = 2</function_calls>"),
    ("olmo3", "<function_calls></function_calls>"),
    ("gemma4", "<|tool_call>call:f{a:1"),
    ("gemma4", "<|tool_call>call:f{a 1}<tool_call|>"),
    ("gemma4", "<|tool_call>f{a:1}<tool_call|>"),
    ("gemma4", '<|tool_call>call:f{s:<|"|>x}<tool_call|>'),
    # Cut off, so that arguments may be missing
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter>'),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ("glm45", "<tool_call>f what?</tool_call>"),
    ("glm45", "<tool_call>f" + "<arg_key>" * 8000),
    ("minimax_m2", "<minimax:tool_call>x</minimax:tool_call>"),
]
FORMATS: dict[str, Format] = {name: format.read(TOOLS) for name, format in CALL_FORMATS.items()} | {
    "think": thinking(THINK, inside=False),
    "inside": thinking(THINK, inside=True),
    "granite_thinking": thinking(GRANITE, inside=False),
    "gemma_thinking": thinking(GEMMA_THOUGHT, inside=False),
    "held list": held_calls(CALL_LIST),
    "held tags": held_calls(CALL_FORMATS["hermes"].free),
    "held sections": held_calls(CALL_FORMATS["deepseek_v3"].free),
}
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "\n", " ", "{", "}", GOOD, f"[{GOOD}]", '"', "\\", "[", "]", "[f(a=1)]", "é"),
    *("[TOOL_CALLS]", "f", "[ARGS]", SECTION, BEGIN, "<｜tool▁sep｜>", '{"a": 1}', END, SECTION_END, "function", "```"),
    *("<function=f>", "<parameter=a>", "1", "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>"),
    *("</arg_value>", '<invoke name="f">', "</invoke>", "<minimax:tool_call>", "</minimax:tool_call>", "; ", ", "),
    *("<|channel|>", "final", "analysis", "<|message|>", "<|end|>", "<|start|>", "assistant", " to=functions.f "),
    *("<think>", "</think>", "Here is my thought process:", "Here is my response:", "<|python_tag|>", "f(", "="),
    *("<|tool_call>", "call:", "<tool_call|>", '<|"|>', "<function_calls>", "</function_calls>", "f{", "a:", ","),
    *('[{"name": "', 'f", "arguments": ', '<tool_call>\n{"name": "f", "arguments": {}', "\n</tool_call>"),
]


def names(template: str, **given: str) -> tuple[str, str]:
    """Return the names of the formats that are chosen, "" for no reasoning."""
    calls, reasoning = choose_formats(template, **given)
    return calls.name, "" if reasoning is None else reasoning.name


def in_pieces(formats: list[Format], text: str, cuts: list[int]) -> list[Part]:
    """Return the parts of an answer that comes in pieces, neighbours of one kind joined."""
    answer, parts = Answer(formats), list[Part]()
    ends = [*sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    for start, end in zip([0, *ends], ends):
        parts += answer.push(text[start:end])
    return joined(parts + answer.push("", last=True))


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_a_call_is_read_in_every_format(name: str, text: str, expected: list[tuple[str, str]]):
    assert whole([FORMATS[name]], text) == expected
    assert in_pieces([FORMATS[name]], text, list(range(len(text)))) == expected


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_malformed_comes_as_text(name: str, text: str):
    assert whole([FORMATS[name]], text) == [("content", text)]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_split_gives_the_same_parts(name: str, data: st.DataObject):
    known = [text for format, text, _ in CASES if format == name]
    text = data.draw(st.lists(st.sampled_from(FRAGMENTS + known), max_size=12).map("".join) | st.text(max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 500), max_size=20))
    parts = whole([FORMATS[name]], text)

    assert in_pieces([FORMATS[name]], text, cuts) == parts
    for part, arguments in itertools.pairwise(parts):
        if part.kind == "call" and not name.startswith("held"):
            assert isinstance(json.loads(arguments.text), dict)
    if name in CALL_FORMATS and name != "gpt_oss" and all(part.kind == "content" for part in parts):
        assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", "<think>\nhm\n</think>\n\nHi", [("reasoning", "hm"), ("content", "Hi")]),
        ("think", "\n<think></think>Hi", [("content", "Hi")]),
        ("think", " Hi <think>no</think>", [("content", " Hi <think>no</think>")]),
        ("think", "<think>cut", [("reasoning", "cut")]),
        ("inside", "hm < x\n</think>Hi </think>", [("reasoning", "hm < x"), ("content", "Hi </think>")]),
        ("inside", "<think>hm</think> Hi", [("reasoning", "hm"), ("content", "Hi")]),
        (
            "granite_thinking",
            "Here is my thought process: hm.\nHere is my response:\nHi",
            [("reasoning", "hm."), ("content", "Hi")],
        ),
        ("held list", f"[{GOOD}, {GOOD}]", [CALL, ONE, CALL, ONE]),
        ("held list", '[{"name": "f", "arguments": {"a": ', [CALL, ("arguments", '{"a": ')]),
        ("held tags", f"<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>\n{GOOD}\n</tool_call>", [CALL, ONE, CALL, ONE]),
    ],
)
def test_reasoning_and_held_calls(name: str, text: str, expected: list[tuple[str, str]]):
    assert whole([FORMATS[name]], text) == expected


def test_content_after_reasoning_is_read_for_calls():
    formats = [FORMATS["inside"], FORMATS["hermes"]]
    text = f"<tool_call>not yet</tool_call></think>\n\nOk <tool_call>{GOOD}</tool_call>"
    assert whole(formats, text) == [
        ("reasoning", "<tool_call>not yet</tool_call>"),
        ("content", "Ok"),
        CALL,
        ONE,
    ]


def test_parts_come_as_soon_as_they_are_certain():
    answer = Answer([FORMATS["think"], FORMATS["hermes"]])
    assert answer.push("<think>a") == [("reasoning", "a")]
    assert answer.push(" b </thi") == [("reasoning", " b")]
    assert answer.push("nk>Well, ") == [("content", "Well,")]
    assert answer.push("a <b>") == [("content", " a <b>")]
    assert answer.push(f"<tool_call>{GOOD}</tool_call>") == [CALL, ONE]
    held = Answer([FORMATS["held list"]])
    assert held.push('[{"name": "f", "arguments": {"a') == [CALL, ("arguments", '{"a')]
    assert held.push('": 1') == [("arguments", '": 1')]
    assert held.push("}}]", last=True) == [("arguments", "}")]


def test_a_template_tells_its_formats():
    for template, expected in {
        "{% if tools %}<tool_call>{% endif %}": ("hermes", ""),
        "<tool_call></think>": ("hermes", "deepseek_r1"),
        "<tool_call><function=": ("qwen3_coder", ""),
        "<tool_call><arg_key></think>": ("glm45", "deepseek_r1"),
        "[TOOL_CALLS]": ("mistral", ""),
        f"{SECTION}{BEGIN}</think>": ("deepseek_v3", "deepseek_r1"),
        "<|tool_call|> Here is my thought process:": ("granite", "granite"),
        "Environment: ipython": ("llama3_json", ""),
        "<|start|><|channel|>": ("gpt_oss", "gpt_oss"),
        "<seed:tool_call><seed:think><function=": ("seed_oss", "seed_oss"),
        "<|tool_call>call:<|channel>thought": ("gemma4", "gemma4"),
        "<functions><function_calls>": ("olmo3", ""),
        "nothing": ("hermes", ""),
    }.items():
        assert names(template) == expected


def test_a_format_has_the_names_that_other_engines_give_it():
    assert names("", calls="llama3", reasoning="deepseek-r1") == ("llama3_json", "deepseek_r1")
    assert names("<think></think>", calls="glm4", reasoning="openai_gptoss") == ("glm45", "gpt_oss")
    for name in ("deepseek_r1", "qwen3", "glm45", "granite"):
        assert names("", reasoning=name) == ("hermes", name)
    with pytest.raises(ConfigError, match="--tool-call-parser jamba is unknown; it can be one of deepseek_v3"):
        choose_formats("", calls="jamba")
    assert names("", calls="openai") == names("", reasoning="gpt_oss") == ("gpt_oss", "gpt_oss")
    with pytest.raises(ConfigError, match="--tool-call-parser harmony needs --reasoning-parser gpt_oss, or none"):
        choose_formats("", calls="harmony", reasoning="qwen3")
    with pytest.raises(ConfigError, match="--reasoning-parser x is unknown"):
        choose_formats("", reasoning="x")
