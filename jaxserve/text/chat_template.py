"""Renders a conversation as prompt text in the model's own format, with the model's Jinja template.

Templates run in Jinja's immutable sandbox, configured as in transformers, since they are written for its
`apply_chat_template`. Never tokenizes: the text contains its special tokens, so encode it with
`add_special_tokens=False`.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.text.answers.formats import CALL_FORMATS, DEFAULT_CALLS
from jaxserve.text.prompt_forms import Message
from jaxserve.text.template_tools import CALL_FORMS, CallForm, calls_in_text, described_in_text

ContentFormat = Literal["auto", "string", "openai"]
type _FoundFormat = Literal["text", "parts", "both"]

_CALL: dict[str, Any] = {"name": "jaxserve_probe", "arguments": {"jaxserve": "probe"}}
_PROBES = ("jaxserve-probe", "jaxserve-second")
_END_MARK = "jaxserve-the-message-goes-on "
# Processor time, since rendering began, in which the message at fault is looked for.
_SEARCH_SECONDS = 0.2
_PRINTED_PARTS = ("'type': 'text'", '"type": "text"')


class ChatTemplate:
    """A template with the special tokens of a tokenizer. Raises `ConfigError` if `source_text` is not a valid template.

    With `source_text` None (a model without a template), every rendering raises `InvalidRequestError`. `calls` names
    the format of calls in texts, for a template that knows no tools. Contents are texts with the `content_format`
    "string" and lists of parts with "openai", except that results of tools are always texts, as in vLLM; with "auto",
    rendering a message of each form shows once for each role what the template supports. The time of a rendering is not
    limited here, but in `template_process`.
    """

    def __init__(
        self,
        source_text: str | None,
        special_tokens: Mapping[str, str],
        calls: str = DEFAULT_CALLS.name,
        content_format: ContentFormat = "auto",
    ) -> None:
        self._call_text = CALL_FORMATS[calls].shown
        self._special_tokens = special_tokens
        self._content_format = content_format
        self._found_formats: dict[str, _FoundFormat] = {}
        try:
            self._template = None if source_text is None else _environment().from_string(source_text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(f"the chat template can't be compiled: {str(error) or type(error).__name__}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation. `kwargs` are further template variables (`chat_template_kwargs`).

        A message's content is a text or a list of `{"type": "text", "text": …}` parts. A template that supports lists
        gets them unchanged; any other gets their texts joined by line feeds. A template that knows no tools gets them,
        their calls and results as text.
        With `continue_final_message`, the prompt ends where the last message ends.
        Raises `InvalidRequestError` with the template's own message if the template fails; it names the message at
        fault if that can be found out.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: send a text instead of messages (to generate, on /v1/completions), "
                "or start with --chat-template FILE"
            )
        deadline = time.process_time() + _SEARCH_SECONDS
        try:
            return self._render_once(messages, add_generation_prompt, continue_final_message, tools, kwargs)
        except _TemplateError as error:

            def attempt(conversation: Sequence[Message]) -> str | None:
                try:
                    self._render_once(conversation, add_generation_prompt, False, tools, kwargs)
                except InvalidRequestError as other:
                    return str(other)
                return None

            number = _find_fault(messages, str(error), attempt, deadline)
            if number is None:
                raise
            raise _TemplateError(error.verb, error.problem, f"messages[{number}]") from error

    def _render_once(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        if tools and self._tools_variable is None:
            messages = described_in_text(messages, tools, self._call_text)
        elif tools:
            kwargs = {str(self._tools_variable): tools, **kwargs}
        if any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            form = self._call_form
            if form is None:
                messages = calls_in_text(messages, self._call_text)
            else:
                messages = [form.apply(message) for message in messages]
        prepared = [self._prepare(message) for message in messages]
        if not continue_final_message:
            return self._render(prepared, add_generation_prompt, kwargs)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
            )
        return self._render_unfinished(prepared, kwargs)

    def turn_end(self) -> str:
        """Return what the template writes after the content of an assistant's last message; "" if it fails, or there is
        none."""
        if self._template is None:
            return ""
        question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBES[0]}
        rendered = self._try([self._prepare(question), self._prepare(answer)])
        return rendered.rpartition(_PROBES[0])[2] if _PROBES[0] in rendered else ""

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        assert self._template is not None
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise _TemplateError("refused", str(error.message)) from error
        except RecursionError as error:
            if _is_deep(kwargs):
                raise InvalidRequestError(
                    "chat_template_kwargs or documents are nested too deep for the chat template",
                    param="chat_template_kwargs",
                ) from error
            raise InvalidRequestError(
                "the chat template recurses too deeply on these messages: a macro may call itself without end",
                param="messages",
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise _TemplateError("failed on", str(error)) from error

    def _render_unfinished(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> str:
        if not messages or not messages[-1].get("content"):
            raise InvalidRequestError(
                "continue_final_message needs a last message with content", param="continue_final_message"
            )
        last = dict(messages[-1])
        content = last["content"]
        if isinstance(content, str):
            last["content"] = content + _END_MARK
        else:
            last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
        rendered = self._render([*messages[:-1], last], False, kwargs)
        end = rendered.rfind(_END_MARK.rstrip())
        if end < 0:
            raise InvalidRequestError(
                "continue_final_message: the chat template doesn't show the last message; leave it out",
                param="continue_final_message",
            )
        # A template that trims the space at the mark's end would also have trimmed the end of the message
        return rendered[:end] if rendered.startswith(_END_MARK, end) else rendered[:end].rstrip()

    @functools.cached_property
    def _tools_variable(self) -> str | None:
        """The variable from which this template reads tools; None if it shows none."""
        tools = [{"type": "function", "function": {"name": _CALL["name"], "description": "x", "parameters": {}}}]
        question = self._prepare({"role": "user", "content": "x"})
        names = ("tools", "xml_tools")
        return next((name for name in names if _CALL["name"] in self._try([question], {name: tools})), None)

    @functools.cached_property
    def _call_form(self) -> CallForm | None:
        """The first form of calls that this template shows; None if it shows none."""
        question = self._prepare({"role": "user", "content": "x"})
        call = {"id": "jaxserve0", "type": "function", "function": _CALL}  # some want nine characters
        asking = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = self._prepare({"role": "tool", "content": "x", "tool_call_id": call["id"], "name": _CALL["name"]})
        for form in CALL_FORMS:
            shown = self._try([question, form.apply(asking), result])
            if _CALL["name"] in shown and str(_CALL["arguments"]) not in shown and "None" not in shown:
                cut = {**asking, "tool_calls": [{**call, "function": {**_CALL, "arguments": _PROBES[0]}}]}
                return form._replace(shows_text=_PROBES[0] in self._try([question, form.apply(cut), result]))
        return None

    def _try(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the prompt of a conversation, without its answer's beginning, or "" if the template refuses it."""
        try:
            return self._render(messages, False, kwargs or {})
        except InvalidRequestError:
            return ""

    def _prepare(self, message: Message) -> dict[str, Any]:
        content, role = message.get("content"), str(message.get("role"))
        if content is not None and not isinstance(content, str):
            texts = [_part_text(part) for part in content]
            if self._find_content_format(role) == "text":
                content = "\n".join(texts)
            else:
                content = [{"type": "text", "text": text} for text in texts]
        elif (content or self._content_format == "openai") and self._find_content_format(role) == "parts":
            content = [] if content is None else [{"type": "text", "text": content}]
        return {**message, "content": content}

    def _find_content_format(self, role: str) -> _FoundFormat:
        if self._content_format != "auto":
            return "parts" if self._content_format == "openai" and role != "tool" else "text"
        if role not in self._found_formats:
            as_text = self._probe(role, _PROBES[0])
            as_parts = self._probe(role, [{"type": "text", "text": probe} for probe in _PROBES])
            # A template that supports only texts prints a list in Python's or JSON's notation, and some read only the
            # first part
            if not all(probe in as_parts for probe in _PROBES):
                found: _FoundFormat = "text"
            elif any(printed in as_parts for printed in _PRINTED_PARTS):
                found = "text"
            else:
                found = "both" if _PROBES[0] in as_text else "parts"
            self._found_formats[role] = found
        return self._found_formats[role]

    def _probe(self, role: str, content: object) -> str:
        messages: list[dict[str, Any]] = [{"role": role, "content": content}]
        if role != "user":  # most templates want a question after a system message, and one before an answer
            question = {"role": "user", "content": self._prepare({"role": "user", "content": "x"})["content"]}
            messages.insert(1 if role == "system" else 0, question)
        return self._try(messages)


class _TemplateError(InvalidRequestError):
    """An error that the template itself raised, on all messages or on one."""

    def __init__(self, verb: str, problem: str, where: str = "") -> None:
        super().__init__(f"the chat template {verb} {where or 'these messages'}: {problem}", param=where or "messages")
        self.verb, self.problem = verb, problem


def _find_fault(
    messages: Sequence[Message], problem: str, attempt: Callable[[Sequence[Message]], str | None], deadline: float
) -> int | None:
    """Return the index of the message at fault: the messages before it render, and with it and any that follow, the
    template raises `problem`. Return None if there is no such message, or if the processor time ends first.

    `attempt` renders a conversation and returns its error. If even the first message fails, it is at fault only if a
    question renders alone and not after it: else something may be missing, or the messages may not be the cause.
    """
    for length in range(len(messages) - 1, 0, -1):
        if time.process_time() > deadline:
            return None
        seen = attempt(messages[:length])
        if seen != problem:
            return length if seen is None else None
    if not messages or time.process_time() > deadline:
        return None
    question = {"role": "user", "content": "x"}
    is_first = attempt([question]) is None and attempt([messages[0], question]) == problem
    return 0 if is_first else None


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequestError(
            f"content parts of type {kind!r} are not supported; describe it in a text", param="messages"
        )
    return str(part["text"])


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than a hundred levels deep."""
    level = [value]
    for _ in range(100):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


class _NoConstantFolding(CodeGenerator):
    """Evaluates no constant expressions at compile time, as their results may be huge: only rendering is limited."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _NoConstantFolding


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        optimized=False,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """The block `{% generation %}`, which marks the assistant's text for training: renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        # What the block sets is not visible after it, as in transformers
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which is wrong in a prompt
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
