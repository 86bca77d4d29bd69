"""How each model writes calls of tools: the texts around calls and in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.text.answers import gemma4
from jaxserve.text.answers.markup_calls import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS

HERMES = "hermes"


class ParameterText(NamedTuple):
    """The texts around a parameter: `begin`, its name, `middle`, its value, `end`; and `between` two of them.

    A text as a value is between two `quote`, and ends where one of `stops` begins. Without `stops`, texts are JSON and
    names are Python's.
    """

    begin: str
    middle: str
    end: str
    between: str = ""
    stops: tuple[str, ...] = ()
    quote: str = ""


class CallText(NamedTuple):
    """The texts around calls and in them: `opening`, then for each call `begin`, its name, `middle`, its arguments and
    `end`, with `between` from one call to the next; then `closing`.

    Arguments are JSON, or written as `parameters`. A call is read wherever one of `marks` is, or where the answer
    begins as the regular expression `answer` says.
    """

    opening: str
    begin: str
    middle: str
    end: str
    between: str
    closing: str
    marks: tuple[str, ...] = ()
    answer: str = ""
    parameters: ParameterText | None = None


CALL_LIST = CallText("[", '{"name": "', '", "arguments": ', "}", ", ", "]")
_FUNCTION_STOPS = ("</parameter>", "<parameter=", "</function>")
_PYTHON = ParameterText("", "=", "", ", ")
CALL_TEXTS = {
    HERMES: CallText("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "", ("<tool_call>",)),
    "granite": CALL_LIST._replace(opening="<|tool_call|>[", marks=("<|tool_call|>", "<tool_call>")),
    "phi4_mini_json": CALL_LIST._replace(
        opening="<|tool_call|>[", closing="]<|/tool_call|>", marks=("<|tool_call|>", "functools")
    ),
    "mistral": CALL_LIST._replace(opening="[TOOL_CALLS][", marks=("[TOOL_CALLS]",)),
    "deepseek_v3": CallText(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ),
    "llama3_json": CALL_LIST._replace(
        opening="", middle='", "parameters": ', between="; ", closing="", answer=r"(<\|python_tag\|>)?\s*[\[{]"
    ),
    "pythonic": CallText(
        *("[", "", "(", ")", ", ", "]"),
        answer=r"(<\|python_start\|>)?\s*\[",
        parameters=_PYTHON,
    ),
    "olmo3": CallText(
        *("<function_calls>", "", "(", ")", "\n", "</function_calls>"),
        marks=("<function_calls>",),
        parameters=_PYTHON,
    ),
    "gemma4": CallText(
        *("", f"{gemma4.BEGIN}call:", "{", f"}}{gemma4.END}", "", ""),
        marks=(gemma4.BEGIN,),
        parameters=ParameterText("", ":", "", ",", stops=(gemma4.QUOTE, gemma4.END), quote=gemma4.QUOTE),
    ),
    "qwen3_coder": CallText(
        *("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", ""),
        marks=QWEN3_CODER.begins,
        parameters=ParameterText("<parameter=", ">\n", "\n</parameter>\n", stops=(*_FUNCTION_STOPS, "</tool_call>")),
    ),
    "seed_oss": CallText(
        *("", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "\n", ""),
        marks=SEED_OSS.begins,
        parameters=ParameterText("<parameter=", ">", "</parameter>\n", stops=(*_FUNCTION_STOPS, "</seed:tool_call>")),
    ),
    "minimax_m2": CallText(
        *("<minimax:tool_call>\n", '<invoke name="', '">\n', "</invoke>\n", "", "</minimax:tool_call>"),
        marks=MINIMAX_M2.begins,
        parameters=ParameterText(
            '<parameter name="',
            '">',
            "</parameter>\n",
            stops=("</parameter>", "<parameter name=", "</invoke>", "</minimax:tool_call>"),
        ),
    ),
    "glm45": CallText(
        *("", "<tool_call>", "\n", "</tool_call>", "\n", ""),
        marks=GLM45.begins,
        parameters=ParameterText(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", stops=("</arg_value>", "</tool_call>")
        ),
    ),
}


def written(form: CallText, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Return calls as a model writes them: functions with their arguments, or with a text that should be these."""
    texts = (f"{form.begin}{name}{form.middle}{_arguments(form, arguments)}{form.end}" for name, arguments in calls)
    return f"{form.opening}{form.between.join(texts)}{form.closing}"


def _arguments(form: CallText, arguments: Mapping[str, Any] | str) -> str:
    parameters = form.parameters
    if isinstance(arguments, str):
        return arguments
    if parameters is None:
        return json.dumps(arguments, ensure_ascii=False)
    found = []
    for name, value in arguments.items():
        is_text = isinstance(value, str) and parameters.stops
        shown = f"{parameters.quote}{value}{parameters.quote}" if is_text else json.dumps(value, ensure_ascii=False)
        found.append(f"{parameters.begin}{name}{parameters.middle}{shown}{parameters.end}")
    return parameters.between.join(found)
