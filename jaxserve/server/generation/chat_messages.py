"""Renders the messages of a chat as one prompt text. Owns which messages and template arguments are accepted; the
template itself belongs to `text/`."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any, NamedTuple, Protocol

import msgspec

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.server.generation.message_fields import (
    CONTINUED_MESSAGE_FIELDS,
    INERT_MESSAGE_FIELDS,
    REASONING_NAMES,
    ROLES,
    UNSUPPORTED_MESSAGE_FIELDS,
    MessageCall,
    MessageFields,
)
from jaxserve.server.generation.prompts import LONG, run_off_event_loop
from jaxserve.server.generation.tools import INPUT
from jaxserve.server.http.decoding import validation_error
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.template_arguments import THINKING_SWITCHES, read_arguments, template_words
from jaxserve.text.tokenizers.tokenizer import TextEncoder


class ChatOptions(Protocol):
    """The fields of a request that change how its messages are rendered."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    escape_marks: bool | None


class RenderedPrompt(NamedTuple):
    """A prompt and what encodes it: `written` may have escaped marks, `text` has them as they are read."""

    text: str
    written: str
    encoder: TextEncoder


async def render_prompt(
    state: ServerState,
    loaded: LoadedModel,
    messages: list[dict[str, Any]],
    options: ChatOptions,
    tools: list[dict[str, Any]] | None = None,
    reasoning_effort: str | None = None,
    thinks: bool | None = None,
) -> RenderedPrompt:
    """Return the prompt. Raises `InvalidRequestError` for messages or options that the template can't express.

    `thinks` turns reasoning on or off, if the template can do that and the options don't.
    """
    source = loaded.template_source
    escapes = state.config.escape_marks if options.escape_marks is None else options.escape_marks
    arguments = _template_arguments(loaded, options, reasoning_effort, thinks, source) if source else {}

    def prepare() -> list[dict[str, Any]]:
        prepared = [_prepare(number, message, source) for number, message in enumerate(messages)]
        if not escapes:
            return prepared
        try:
            marks = loaded.escaped_marks
        except ConfigError as error:
            raise InvalidRequestError(str(error), param="escape_marks") from error
        if "documents" in arguments:
            arguments["documents"] = marks.escape(arguments["documents"])
        return [marks.escape(message) for message in prepared]

    size = max(len(messages), LONG if escapes else 0)
    prepared = await run_off_event_loop(state, size, prepare)
    if not prepared:
        raise InvalidRequestError("messages is empty; send at least one", param="messages")
    continues = bool(options.continue_final_message)
    text = await loaded.chat_template.render(
        prepared,
        add_generation_prompt=not continues if options.add_generation_prompt is None else options.add_generation_prompt,
        continue_final_message=continues,
        tools=tools,
        **arguments,
    )
    if not escapes:
        return RenderedPrompt(text, text, loaded.tokenizer)
    return RenderedPrompt(loaded.escaped_marks.restore(text), text, loaded.escaped_marks)


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message that has been rendered, up to its first part if it has several."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return next((text for part in parts if isinstance(text := part.get("text"), str)), "")


def _template_arguments(
    loaded: LoadedModel, options: ChatOptions, reasoning_effort: str | None, thinks: bool | None, source: str
) -> dict[str, Any]:
    """Return the arguments of the template. What the request says of reasoning wins over the server's defaults, as in
    vLLM, whatever field says it."""
    reasons = loaded.formats.reasoning is not None
    arguments = read_arguments(options.chat_template_kwargs or {}, source, reasons=reasons)
    words = template_words(source) if reasoning_effort or thinks is not None else ()
    if thinks is not None and not switches_thinking(options):
        arguments |= {name: thinks for name in THINKING_SWITCHES if name in words}
    if reasoning_effort is not None and "reasoning_effort" in words:
        arguments.setdefault("reasoning_effort", reasoning_effort)
    elif reasoning_effort is not None and "enable_thinking" in words:
        arguments.setdefault("enable_thinking", reasoning_effort != "none")
    elif reasoning_effort == "none" and reasons and thinks is not False:
        raise InvalidRequestError(
            "reasoning_effort: this model always reasons, as its chat template has neither that nor enable_thinking; "
            "leave the field out, or send thinking_token_budget: 0 instead, which ends the reasoning at once",
            param="reasoning_effort",
        )
    elif reasoning_effort is not None:
        loaded.say_once("reasoning_effort changes nothing: this model's chat template doesn't read it")
    for name, value in loaded.template_defaults.items():
        if name in THINKING_SWITCHES and reasoning_effort is not None:
            arguments.setdefault(name, reasoning_effort != "none")
        if arguments.get(name) is None and not (thinks and value == "none"):
            arguments[name] = value
    if options.documents:
        if "documents" not in template_words(source):
            raise InvalidRequestError(
                "documents: this model's chat template does not use them; write them into a message", param="documents"
            )
        arguments["documents"] = options.documents
    return arguments


def switches_thinking(options: ChatOptions) -> bool:
    """Return whether the options themselves turn reasoning on or off."""
    return any(name in (options.chat_template_kwargs or ()) for name in THINKING_SWITCHES)


def _prepare(number: int, given: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a message as templates expect it: its role, its content and its other fields."""
    where = f"messages[{number}]"
    try:
        message = msgspec.convert(given, MessageFields)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), where, kind=MessageFields) from error
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:40]!r}", param=f"{where}.role"
        )
    for name, advice in UNSUPPORTED_MESSAGE_FIELDS.items():
        if getattr(message, name) not in (None, []):
            raise InvalidRequestError(
                f"{where}.{name} is not supported: only null or [] is accepted; {advice}", param=f"{where}.{name}"
            )
    for name in CONTINUED_MESSAGE_FIELDS:
        if given.get(name) and name not in template_words(source):
            raise InvalidRequestError(
                f"{where}.{name} is not supported by this model's chat template; send continue_final_message: true",
                param=f"{where}.{name}",
            )
    # "developer" is OpenAI's newer name for the system role; most templates don't know it.
    role = "system" if message.role == "developer" and "developer" not in source else message.role
    # Clients send an answer back with all its fields; templates test whether a field is there, not whether it is null.
    left_out = (*UNSUPPORTED_MESSAGE_FIELDS, *INERT_MESSAGE_FIELDS)
    others = {name: value for name, value in given.items() if name not in left_out and value is not None}
    prepared = {**others, "role": role, "content": _content(where, message)}
    if message.tool_calls:
        if role != "assistant":
            raise InvalidRequestError(
                f"{where}.tool_calls: only messages of the assistant have calls; leave it out",
                param=f"{where}.tool_calls",
            )
        prepared["tool_calls"] = [_call(call) for call in message.tool_calls]
    else:
        prepared.pop("tool_calls", None)
    return _with_reasoning(prepared, source) if role == "assistant" else prepared


@functools.lru_cache(4)
def _reasoning_names(source: str) -> tuple[str, ...]:
    """Return the names under which a template reads the reasoning of a message."""
    read = set(re.findall(rf"[.'\"]({'|'.join(REASONING_NAMES)})\b", source))
    return tuple(name for name in REASONING_NAMES if name in read)


def _with_reasoning(message: dict[str, Any], source: str) -> dict[str, Any]:
    """Return an answer with its reasoning under the name that the template reads.

    gpt-oss' template shows the content beside calls as reasoning, and takes no other then.
    """
    names = _reasoning_names(source)
    given = next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), "")
    if not given or not names or any(name in message for name in names):
        return message
    content = message["content"]
    if names[0] == "thinking" and "tool_calls" in message and isinstance(content, str) and content:
        return {**message, "content": "", names[0]: f"{given}\n\n{content}"}
    return {**message, names[0]: given}


# An escaped backslash; or half a character as JSON escapes it, without the other half, as models may write.
_HALF_PAIR = re.compile(
    r"(\\\\)|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    r"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def _call(call: MessageCall) -> dict[str, Any]:
    """Return a call as most templates expect it, with its arguments as an object.

    Arguments that are no object stay text: models write such, and an answer may have been cut off within them.
    """
    if call.function is None:
        assert call.custom is not None
        function = {"name": call.custom.name, "arguments": {INPUT: call.custom.input}}
        return {"id": call.id, "type": "function", "function": function}
    arguments = call.function.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            whole = _HALF_PAIR.sub(lambda found: found[1] or r"\ufffd", arguments) if "\\u" in arguments else arguments
            arguments = msgspec.json.decode(whole or "{}", type=dict[str, Any])
    elif not isinstance(arguments, dict):
        arguments = {} if arguments is None else msgspec.json.encode(arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _content(where: str, message: MessageFields) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role in ("assistant", "tool"):
            return ""
        raise InvalidRequestError(f"{where}.content is required", param=f"{where}.content")
    parts = []
    for number, part in enumerate(message.content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            raise InvalidRequestError(
                f"{where}.content[{number}] has type {part.type[:40]!r}: only parts of type 'text' with a text are "
                "supported; leave others out, or describe them in a text",
                param=f"{where}.content[{number}]",
            )
        parts.append({"type": "text", "text": text})
    return parts
