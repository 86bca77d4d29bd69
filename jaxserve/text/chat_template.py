"""Renders a conversation as the text its model was trained on, by the model's own Jinja template.

Templates run in Jinja's immutable sandbox, set up as in transformers, for whose `apply_chat_template` they are written.
Never tokenizes: the rendered text holds its special tokens, so encode it with `add_special_tokens=False`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import ConfigError, InvalidRequestError

type Message = Mapping[str, Any]

_PROBE = "jaxserve-probe"
_MARK = "jaxserve-the-message-goes-on "
_PRINTED_PARTS = ("'type': 'text'", '"type": "text"')


class ChatTemplate:
    """One template with the special tokens of one tokenizer. Raises `ConfigError` if `source_text` is no template.

    `source_text` None stands for a model without a template: every rendering then raises `InvalidRequestError`. Nothing
    bounds how long one takes: `template_process` does.
    """

    def __init__(self, source_text: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._content_format: Literal["text", "parts", "both"] | None = None
        try:
            self._template = None if source_text is None else _environment().from_string(source_text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is no valid Jinja: line {error.lineno}: {error.message}") from error
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
        """The prompt of a conversation. `kwargs` are further variables of the template (`chat_template_kwargs`).

        A message's content is a text or a list of `{"type": "text", "text": …}` parts. A template that handles lists
        gets them as they are, another gets their texts joined by line feeds; which one it is, is found out once by
        rendering a message of either form. With `continue_final_message` the prompt ends where the last message does.
        Raises `InvalidRequestError` with the template's own message where it fails.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or start with --chat-template FILE"
            )
        prepared = [self._prepare(message) for message in messages]
        if not continue_final_message:
            return self._render(prepared, tools, add_generation_prompt, kwargs)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
            )
        return self._render_unfinished(prepared, tools, kwargs)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        assert self._template is not None
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused: {error.message}", param="messages") from error
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
            raise InvalidRequestError(
                f"the chat template failed on these messages: {error}", param="messages"
            ) from error

    def _render_unfinished(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> str:
        if not messages or not messages[-1].get("content"):
            raise InvalidRequestError(
                "continue_final_message needs a last message with content", param="continue_final_message"
            )
        last = dict(messages[-1])
        content = last["content"]
        if isinstance(content, str):
            last["content"] = content + _MARK
        else:
            last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]
        rendered = self._render([*messages[:-1], last], tools, False, kwargs)
        end = rendered.rfind(_MARK.rstrip())
        if end < 0:
            raise InvalidRequestError(
                "continue_final_message: the chat template doesn't show the last message",
                param="continue_final_message",
            )
        # A template that trims the mark's own space would have trimmed the message's
        return rendered[:end] if rendered.startswith(_MARK, end) else rendered[:end].rstrip()

    def _prepare(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            texts = [_part_text(part) for part in content]
            if self._format() == "text":
                content = "\n".join(texts)
            else:
                content = [{"type": "text", "text": text} for text in texts]
        elif content and self._format() == "parts":
            content = [{"type": "text", "text": content}]
        return {**message, "content": content}

    def _format(self) -> Literal["text", "parts", "both"]:
        if self._content_format is None:
            as_text = self._probe(_PROBE)
            as_parts = self._probe([{"type": "text", "text": _PROBE}])
            # A template that only knows texts prints a list as Python or JSON does
            if as_parts is None or _PROBE not in as_parts or any(printed in as_parts for printed in _PRINTED_PARTS):
                self._content_format = "text"
            else:
                self._content_format = "both" if as_text is not None and _PROBE in as_text else "parts"
        return self._content_format

    def _probe(self, content: object) -> str | None:
        try:
            return self._render([{"role": "user", "content": content}], None, False, {})
        except InvalidRequestError:
            return None


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequestError(f"content parts of type {kind!r} are not supported, only 'text'", param="messages")
    return str(part["text"])


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested in each other more than a hundred times."""
    level = [value]
    for _ in range(100):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


class _NothingAhead(CodeGenerator):
    """Computes nothing when it compiles: an expression of constants may be huge, and what renders it has the bounds."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _NothingAhead


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        optimized=False,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what training counts as the assistant's; here its body is shown and that is all."""

    tags = {"generation"}  # noqa: RUF012 - an instance attribute would hide Jinja's own

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no prompt wants
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
