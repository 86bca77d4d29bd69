"""The forms in which Python code gives prompts and conversations. Never tokenizes or renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeGuard

from jaxserve.errors import InvalidRequestError


class TextPrompt(TypedDict):
    """A text, as vLLM's class of this name."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, as vLLM's class of this name."""

    prompt_token_ids: Sequence[int]


type Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
type Message = Mapping[str, Any]

_FORMS = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Return one prompt or several as texts and lists of ids. A list of integers is one prompt.

    Raises `InvalidRequestError` that says what was given and what a prompt may be.
    """
    if not _is_list(prompts) or (prompts and isinstance(prompts[0], int)):
        return [read_prompt(prompts)]  # type: ignore[arg-type]
    return [read_prompt(prompt, f"prompts[{number}]") for number, prompt in enumerate(prompts)]


def read_prompt(prompt: Prompt, where: str = "the prompt") -> str | list[int]:
    """Return one prompt as a text or a list of ids; `where` names it in errors."""
    given: Any = prompt
    match given:
        case str():
            return given
        case {"prompt": str(text), **others} if not others:
            return text
        case [*ids] | {"prompt_token_ids": [*ids]} if len(given) == 1 or not isinstance(given, Mapping):
            for token in ids:
                if type(token) is not int:
                    raise InvalidRequestError(f"{where} holds {token!r}, which is not a token id", param="prompt")
            return ids
        case Mapping():
            kind = f"{{{', '.join(f'{key!r}: {type(value).__name__}' for key, value in given.items())}}}"
        case _:
            kind = f"of type {type(given).__name__}"
    raise InvalidRequestError(f"{where} is {kind}: a prompt is {_FORMS}", param="prompt")


def read_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """Return one conversation or several as lists of messages. Raises `InvalidRequestError`."""
    if not _is_list(messages) or (messages and isinstance(messages[0], Mapping)):
        return [read_conversation(messages)]  # type: ignore[arg-type]
    return [read_conversation(conversation) for conversation in messages]


def read_conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation as a list of messages. Raises `InvalidRequestError`."""
    given = messages if _is_list(messages) else [messages]
    if given is not messages or not all(isinstance(message, Mapping) for message in messages):
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in given))
        raise InvalidRequestError(
            f'a conversation is a list of messages {{"role": …, "content": …}}, got {kinds}', param="messages"
        )
    return [dict(message) for message in messages]


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence of anything but characters or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
