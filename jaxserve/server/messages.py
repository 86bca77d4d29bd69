"""From the messages of a chat to one prompt text. Owns which messages and template arguments are accepted; the template
itself is `text/`'s."""

from __future__ import annotations

from typing import Any, Protocol

from jaxserve.errors import InvalidRequestError
from jaxserve.server.openai.protocol import Message
from jaxserve.server.prompts import off_loop
from jaxserve.server.serving import Loaded, Serving

_ROLES = ("system", "developer", "user", "assistant")
_NOT_BUILT = ("audio", "function_call", "tool_calls", "tool_call_id")
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class Conversation(Protocol):
    """What of a request makes the prompt."""

    messages: list[Message]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


async def render(serving: Serving, loaded: Loaded, request: Conversation) -> str:
    """The prompt text. Raises `InvalidRequestError` for what the template can't express."""
    source = loaded.template_source
    messages = await off_loop(
        serving,
        len(request.messages),
        lambda: [_as_dict(number, message, source) for number, message in enumerate(request.messages)],
    )
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages")
    going_on = bool(request.continue_final_message)
    prompting = not going_on if request.add_generation_prompt is None else request.add_generation_prompt
    arguments = _arguments(request, source) if source else {}
    return await loaded.chat_template.render(
        messages, add_generation_prompt=prompting, continue_final_message=going_on, **arguments
    )


def _arguments(request: Conversation, source: str) -> dict[str, Any]:
    arguments = dict(request.chat_template_kwargs or {})
    for name in arguments:
        param = f"chat_template_kwargs.{name[:100]}"
        if name in _OURS:
            raise InvalidRequestError(f"{param}: {name} is a field of its own", param=param)
        if not name.isidentifier() or name not in source:
            raise InvalidRequestError(f"{param}: this model's chat template does not use it", param=param)
    if request.documents:
        if "documents" not in source:
            raise InvalidRequestError("documents: this model's chat template does not use them", param="documents")
        arguments["documents"] = request.documents
    return arguments


def _as_dict(number: int, message: Message, source: str) -> dict[str, Any]:
    where = f"messages[{number}]"
    if message.role not in _ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {message.role[:40]!r}", param=f"{where}.role"
        )
    for name in _NOT_BUILT:
        if getattr(message, name) not in (None, []):
            raise InvalidRequestError(
                f"{where}.{name} is not supported yet: only null is accepted", param=f"{where}.{name}"
            )
    # "developer" is OpenAI's newer name for the system's role, which most templates don't know.
    role = "system" if message.role == "developer" and "developer" not in source else message.role
    result: dict[str, Any] = {"role": role, "content": _content(where, message)}
    if message.name is not None:
        result["name"] = message.name
    return result


def _content(where: str, message: Message) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequestError(f"{where}.content is required", param=f"{where}.content")
    parts = []
    for number, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"{where}.content[{number}] has type {part.type[:40]!r}: only parts of type 'text' with a text are "
                "supported",
                param=f"{where}.content[{number}]",
            )
        parts.append({"type": "text", "text": part.text})
    return parts
