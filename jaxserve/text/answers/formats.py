"""The formats in which models write calls of tools and reasoning, one record each, and which ones a template is for.

A new format is a row in one of the two tables and, where it reads differently, a reader. The names are vLLM's and
SGLang's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.text.answers import gemma4
from jaxserve.text.answers.call_texts import CALL_LIST, CallText, ParameterText
from jaxserve.text.answers.harmony import harmony
from jaxserve.text.answers.json_calls import bare_json, deepseek_v3, marked_json, mistral
from jaxserve.text.answers.markup_calls import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, markup
from jaxserve.text.answers.pythonic import olmo3, pythonic
from jaxserve.text.answers.reader import Format
from jaxserve.text.answers.reasoning import GEMMA_THOUGHT, GRANITE, SEED_THINK, THINK, Thinking, thinking

if TYPE_CHECKING:
    from jaxserve.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: `text` has the texts of a call, and `read` returns the reader of calls of tools, which
    are JSON schemas of the parameters by function.

    `others` are other names of the format, after "-" has become "_". A template that contains one of `in_templates` is
    written for it. `short_ids`: templates want ids of nine characters. Without `text`, calls are messages in channels.
    """

    name: str
    in_templates: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Format]
    text: CallText | None
    short_ids: bool = False

    @property
    def in_channels(self) -> bool:
        """Whether calls are messages in channels."""
        return self.text is None

    @property
    def shown(self) -> CallText:
        """The form of calls in texts, for a template that knows no tools."""
        return self.text or _HERMES

    @property
    def held(self) -> CallText:
        """The form of calls in an answer that has nothing else: the model's own, or JSON."""
        return CALL_LIST if self.text is None or self.text.parameters is not None else self.text

    @property
    def free(self) -> CallText:
        """The form of calls in an answer that may have none: the model's own, outside of channels."""
        assert self.text is not None
        return self.text


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes reasoning: between `marks`, or without them in a channel. `CallFormat` explains the others."""

    name: str
    in_templates: tuple[str, ...]
    others: tuple[str, ...]
    marks: Thinking | None

    @property
    def in_channels(self) -> bool:
        """Whether reasoning is a message in a channel."""
        return self.marks is None

    def read(self, *, inside: bool, ended: bool = False) -> Format:
        """Return the reader of an answer that may begin with reasoning, or begins `inside` of it, or where it has just
        `ended`."""
        return harmony if self.marks is None else thinking(self.marks, inside=inside, ended=ended)


def _json_calls(name: str, in_templates: str, others: tuple[str, ...], text: CallText, end: str) -> CallFormat:
    return CallFormat(name, (in_templates,), others, lambda _: marked_json(text.marks, end), text)


_CHANNEL_CALLS = CallFormat("gpt_oss", ("<|channel|>",), ("openai", "harmony"), lambda _: harmony, None)
_CHANNELS = ReasoningFormat("gpt_oss", ("<|channel|>",), ("openai_gptoss", "harmony"), None)
_LLAMA = ("<|python_tag|>", "Environment: ipython")
_GLM, _QWEN3_CODER = ("glm", "glm4", "glm4_moe", "glm47"), ("qwen3_xml", "qwen_xml")
_DEEPSEEK = ("deepseekv3", "deepseek_v31")
_PYTHON = ParameterText("", "=", "", ", ")
_FUNCTION_STOPS = ("</parameter>", "<parameter=", "</function>")
_HERMES = CallText(
    "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "", marks=("<tool_call>",),
    example="as a JSON object between two tags, for each call anew",
)  # fmt: skip
DEFAULT_CALLS = _json_calls(
    "hermes", "<tool_call>", ("qwen", "qwen25", "qwen3", "exaone", "smollm3"), _HERMES, "</tool_call>"
)
"""The format of calls for a template that knows none."""
# Both tables are in the order in which a template is searched for marks.
_CALLS = (
    _CHANNEL_CALLS,
    CallFormat("minimax_m2", ("<minimax:tool_call>",), ("minimax",), functools.partial(markup, MINIMAX_M2), CallText(
        "<minimax:tool_call>\n", '<invoke name="', '">\n', "</invoke>\n", "", "</minimax:tool_call>",
        marks=MINIMAX_M2.begins,
        parameters=ParameterText('<parameter name="', '">', "</parameter>\n", stops=(
            "</parameter>", "<parameter name=", "</invoke>", "</minimax:tool_call>",
        )),
    )),
    CallFormat("seed_oss", ("<seed:tool_call>",), (), functools.partial(markup, SEED_OSS), CallText(
        "", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "\n", "",
        marks=SEED_OSS.begins,
        parameters=ParameterText("<parameter=", ">", "</parameter>\n", stops=(*_FUNCTION_STOPS, "</seed:tool_call>")),
    )),
    CallFormat("glm45", ("<arg_key>",), _GLM, functools.partial(markup, GLM45), CallText(
        "", "<tool_call>", "\n", "</tool_call>", "\n", "", marks=GLM45.begins,
        parameters=ParameterText(
            "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", stops=("</arg_value>", "</tool_call>")
        ),
    )),
    CallFormat("qwen3_coder", ("<function=",), _QWEN3_CODER, functools.partial(markup, QWEN3_CODER), CallText(
        "", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", "", marks=QWEN3_CODER.begins,
        parameters=ParameterText("<parameter=", ">\n", "\n</parameter>\n", stops=(*_FUNCTION_STOPS, "</tool_call>")),
    )),
    CallFormat("mistral", ("[TOOL_CALLS]",), (), lambda _: mistral, CALL_LIST._replace(
        opening="[TOOL_CALLS][", marks=("[TOOL_CALLS]",),
    ), short_ids=True),
    CallFormat("deepseek_v3", ("<｜tool▁call▁begin｜>",), (*_DEEPSEEK, "deepseekv31"), lambda _: deepseek_v3, CallText(
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
        "\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>",
        marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    )),
    _json_calls("phi4_mini_json", "<|/tool_call|>", ("phi4_mini",), CALL_LIST._replace(
        opening="<|tool_call|>[", closing="]<|/tool_call|>", marks=("<|tool_call|>", "functools"),
    ), "<|/tool_call|>"),
    _json_calls("granite", "<|tool_call|>", (), CALL_LIST._replace(
        opening="<|tool_call|>[", marks=("<|tool_call|>", "<tool_call>"),
    ), "</tool_call>"),
    DEFAULT_CALLS,
    CallFormat("gemma4", (gemma4.BEGIN,), (), lambda _: gemma4.gemma4, CallText(
        "", f"{gemma4.BEGIN}call:", "{", f"}}{gemma4.END}", "", "", marks=(gemma4.BEGIN,),
        parameters=ParameterText("", ":", "", ",", stops=(gemma4.QUOTE, gemma4.END), quote=gemma4.QUOTE),
    )),
    CallFormat("olmo3", ("<function_calls>",), (), lambda _: olmo3, CallText(
        "<function_calls>", "", "(", ")", "\n", "</function_calls>", marks=("<function_calls>",),
        parameters=_PYTHON,
    )),
    CallFormat("pythonic", ("<|python_start|>", "func_name1("), ("llama4_pythonic", "llama4"), pythonic, CallText(
        "[", "", "(", ")", ", ", "]", answer=r"(<\|python_start\|>)?\s*\[", parameters=_PYTHON,
    )),
    CallFormat("llama3_json", _LLAMA, ("llama3", "llama4_json"), bare_json, CallText(
        "", '{"name": "', '", "parameters": ', "}", "; ", "", answer=r"(<\|python_tag\|>)?\s*[\[{]",
    )),
)  # fmt: skip
_REASONING = (
    _CHANNELS,
    ReasoningFormat("gemma4", ("<|channel>",), (), GEMMA_THOUGHT),
    ReasoningFormat("seed_oss", ("<seed:think>",), (), SEED_THINK),
    ReasoningFormat("deepseek_r1", ("</think>", "<think>"), (*_DEEPSEEK, "deepseek_v3", "think"), THINK),
    ReasoningFormat("granite", ("Here is my thought process:",), (), GRANITE),
    ReasoningFormat("qwen3", (), ("qwen3_thinking", "smollm3", "exaone4"), THINK),
    ReasoningFormat("glm45", (), _GLM, THINK),
    ReasoningFormat("minimax_m2", (), ("minimax", "minimax_m2_append_think"), THINK),
)
CALL_FORMATS = {one.name: one for one in _CALLS}


class AnswerFormats(NamedTuple):
    """The formats of a model's calls and of its reasoning, if it reasons."""

    calls: CallFormat
    reasoning: ReasoningFormat | None

    def shows_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Return whether marks of these formats are special tokens, which are left out of texts otherwise."""
        marks = self.calls.in_templates + (() if self.reasoning is None else self.reasoning.in_templates)
        return any(tokenizer.special_id(mark) is not None for mark in marks)

    @property
    def in_channels(self) -> bool:
        """Whether calls and reasoning are messages of one format, that of gpt-oss."""
        return self.calls.in_channels and self.reasoning is not None and self.reasoning.in_channels

    @property
    def thinking(self) -> Thinking | None:
        """The marks around reasoning, if it has any."""
        return None if self.reasoning is None else self.reasoning.marks


def choose_formats(template: str, *, calls: str | None = None, reasoning: str | None = None) -> AnswerFormats:
    """Return the formats with these names (`--tool-call-parser`, `--reasoning-parser`), or those of a chat template.

    Raises `ConfigError` for an unknown name, and for calls in channels beside reasoning that is not in a channel. If a
    template knows no calls, they are written as Hermes writes them.
    """
    call = None if calls is None else _named(calls, _CALLS, "--tool-call-parser")
    thought = None if reasoning is None else _named(reasoning, _REASONING, "--reasoning-parser")
    if call is not None and call.in_channels and thought is not None and not thought.in_channels:
        raise ConfigError(f"--tool-call-parser {calls} needs --reasoning-parser {_CHANNELS.name}, or none")
    if any(one is not None and one.in_channels for one in (call, thought)):
        return AnswerFormats(call or _CHANNEL_CALLS, _CHANNELS)
    return AnswerFormats(
        call or _written_for(template, _CALLS) or DEFAULT_CALLS, thought or _written_for(template, _REASONING)
    )


def _named[F: CallFormat | ReasoningFormat](given: str, formats: Sequence[F], flag: str) -> F:
    by_name = {name: one for one in formats for name in (one.name, *one.others)}
    found = by_name.get(given.lower().replace("-", "_"))
    if found is None:
        raise ConfigError(f"{flag} {given} is unknown; it can be one of {', '.join(sorted(by_name))}")
    return found


def _written_for[F: CallFormat | ReasoningFormat](template: str, formats: Sequence[F]) -> F | None:
    return next((one for one in formats if any(mark in template for mark in one.in_templates)), None)
