"""From the messages of a chat to one prompt text. Owns which messages and template arguments are accepted; the template
itself is `text/`'s."""

from __future__ import annotations

import functools
import re
from typing import Any, Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.prompts import off_loop
from jaxserve.server.http.bodies import explain
from jaxserve.server.openai.protocol import NOT_BUILT, ROLES, Message
from jaxserve.server.server_state import Loaded, Serving

OURS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class Conversation(Protocol):
    """What of a request makes the prompt."""

    messages: list[dict[str, Any]]
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
        lambda: [_for_template(number, message, source) for number, message in enumerate(request.messages)],
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
    names = template_names(source) if arguments else ()
    for name in arguments:
        param = f"chat_template_kwargs.{name[:100]}"
        if name in OURS:
            raise InvalidRequestError(f"{param}: {name} is a field of its own", param=param)
        if name not in names:
            raise InvalidRequestError(f"{param}: this model's chat template does not use it", param=param)
    if request.documents:
        if "documents" not in template_names(source):
            raise InvalidRequestError("documents: this model's chat template does not use them", param="documents")
        arguments["documents"] = request.documents
    return arguments


@functools.lru_cache(4)
def template_names(source: str) -> frozenset[str]:
    """The words of a template; what are its variables is among them."""
    return frozenset(re.findall(r"[^\W\d]\w*", source))


def _for_template(number: int, given: dict[str, Any], source: str) -> dict[str, Any]:
    """A message as templates know it: its role, its content, and whatever else it has."""
    where = f"messages[{number}]"
    try:
        message = msgspec.convert(given, Message)
    except msgspec.ValidationError as error:
        raise explain(str(error), where) from error
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:40]!r}", param=f"{where}.role"
        )
    for name in NOT_BUILT:
        if getattr(message, name) not in (None, []):
            raise InvalidRequestError(
                f"{where}.{name} is not supported yet: only null is accepted", param=f"{where}.{name}"
            )
    # "developer" is OpenAI's newer name for the system's role, which most templates don't know.
    role = "system" if message.role == "developer" and "developer" not in source else message.role
    # Clients send back an answer with all its fields; templates ask whether they are there, not whether they are null.
    others = {name: value for name, value in given.items() if name not in NOT_BUILT and value is not None}
    return {**others, "role": role, "content": _content(where, message)}


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
