"""The formats by name, as vLLM and SGLang call them, and which one a chat template is written for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.text.answers.call_texts import HERMES
from jaxserve.text.answers.gemma4 import gemma4
from jaxserve.text.answers.harmony import harmony
from jaxserve.text.answers.json_calls import bare_json, deepseek_v3, marked_json, mistral
from jaxserve.text.answers.markup_calls import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, markup
from jaxserve.text.answers.pythonic import olmo3, pythonic
from jaxserve.text.answers.reader import Format
from jaxserve.text.answers.reasoning import GEMMA_THOUGHT, GRANITE, SEED_THINK, THINK, Thinking
from jaxserve.text.tokenizers.tokenizer import Tokenizer

HARMONY = "gpt_oss"

_GRANITE_CALLS = ("<|tool_call|>", "<tool_call>")
_CALLS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "hermes": lambda _: marked_json(("<tool_call>",), "</tool_call>"),
    "granite": lambda _: marked_json(_GRANITE_CALLS, "</tool_call>"),
    "phi4_mini_json": lambda _: marked_json(("<|tool_call|>", "functools"), "<|/tool_call|>"),
    "mistral": lambda _: mistral,
    "deepseek_v3": lambda _: deepseek_v3,
    "llama3_json": bare_json,
    "pythonic": pythonic,
    "olmo3": lambda _: olmo3,
    "gemma4": lambda _: gemma4,
    "qwen3_coder": functools.partial(markup, QWEN3_CODER),
    "seed_oss": functools.partial(markup, SEED_OSS),
    "minimax_m2": functools.partial(markup, MINIMAX_M2),
    "glm45": functools.partial(markup, GLM45),
    HARMONY: lambda _: harmony,
}
_REASONING: dict[str, Thinking | None] = {
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "glm45": THINK,
    "minimax_m2": THINK,
    "seed_oss": SEED_THINK,
    "granite": GRANITE,
    "gemma4": GEMMA_THOUGHT,
    HARMONY: None,
}
# Other names of the same formats, after "-" has become "_".
_CALL_NAMES = {
    **dict.fromkeys(("qwen", "qwen25", "qwen3", "exaone", "smollm3"), HERMES),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("llama4_pythonic", "llama4"), "pythonic"),
    **dict.fromkeys(("deepseekv3", "deepseek_v31", "deepseekv31"), "deepseek_v3"),
    **dict.fromkeys(("qwen3_xml", "qwen_xml"), "qwen3_coder"),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "glm47"), "glm45"),
    **dict.fromkeys(("openai", "harmony"), HARMONY),
    "minimax": "minimax_m2",
    "phi4_mini": "phi4_mini_json",
}
_REASONING_NAMES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseekv3", "think"), "deepseek_r1"),
    **dict.fromkeys(("qwen3_thinking", "smollm3", "exaone4"), "qwen3"),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "glm47"), "glm45"),
    **dict.fromkeys(("openai_gptoss", "harmony"), HARMONY),
    **dict.fromkeys(("minimax", "minimax_m2_append_think"), "minimax_m2"),
}
# What a template contains that is written for a format; the first that is found counts.
_CALLS_BY_MARK = {
    "<|channel|>": HARMONY,
    "<minimax:tool_call>": "minimax_m2",
    "<seed:tool_call>": "seed_oss",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁call▁begin｜>": "deepseek_v3",
    "<|/tool_call|>": "phi4_mini_json",
    "<|tool_call|>": "granite",
    "<tool_call>": HERMES,
    "<|tool_call>": "gemma4",
    "<function_calls>": "olmo3",
    "<|python_start|>": "pythonic",
    "func_name1(": "pythonic",
    "<|python_tag|>": "llama3_json",
    "Environment: ipython": "llama3_json",
}
_REASONING_BY_MARK = {
    "<|channel|>": HARMONY,
    "<|channel>": "gemma4",
    "<seed:think>": "seed_oss",
    "</think>": "deepseek_r1",
    "<think>": "deepseek_r1",
    "Here is my thought process:": "granite",
}


class AnswerFormats(NamedTuple):
    """The names of the formats of a model's calls and of its reasoning, empty for none."""

    calls: str
    reasoning: str

    def read_calls(self, tools: Mapping[str, Any]) -> Format:
        """Return the format of calls of `tools`, JSON schemas of the parameters by function."""
        return _CALLS[self.calls](tools)

    def shows_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Return whether marks of these formats are special tokens, which are left out of texts otherwise."""
        marks = [mark for mark, name in _CALLS_BY_MARK.items() if name == self.calls]
        marks += [mark for mark, name in _REASONING_BY_MARK.items() if name == self.reasoning]
        return any(tokenizer.special_id(mark) is not None for mark in marks)

    @property
    def in_channels(self) -> bool:
        """Whether calls and reasoning are messages of one format, that of gpt-oss."""
        return self.calls == self.reasoning == HARMONY

    @property
    def thinking(self) -> Thinking | None:
        """The marks around reasoning, if it has any."""
        return _REASONING[self.reasoning] if self.reasoning else None


def choose_formats(template: str, *, calls: str | None = None, reasoning: str | None = None) -> AnswerFormats:
    """Return the formats with these names (`--tool-call-parser`, `--reasoning-parser`), or those of a chat template.

    Raises `ConfigError` for an unknown name, and for the calls of gpt-oss beside other reasoning, which share its
    channels. Calls of a template that knows none are written as Hermes does.
    """
    call_name = "" if calls is None else _named(calls, _CALLS, _CALL_NAMES, "--tool-call-parser")
    thought_name = "" if reasoning is None else _named(reasoning, _REASONING, _REASONING_NAMES, "--reasoning-parser")
    if call_name == HARMONY and thought_name not in ("", HARMONY):
        raise ConfigError(f"--tool-call-parser {calls} needs --reasoning-parser {HARMONY}, or none")
    if HARMONY in (call_name, thought_name):
        return AnswerFormats(call_name or HARMONY, HARMONY)
    return AnswerFormats(
        call_name or next((name for mark, name in _CALLS_BY_MARK.items() if mark in template), HERMES),
        thought_name or next((name for mark, name in _REASONING_BY_MARK.items() if mark in template), ""),
    )


def _named(given: str, formats: Mapping[str, Any], others: Mapping[str, str], flag: str) -> str:
    name = given.lower().replace("-", "_")
    name = others.get(name, name)
    if name not in formats:
        raise ConfigError(f"{flag} {given} is unknown; it can be one of {', '.join(sorted({*formats, *others}))}")
    return name
