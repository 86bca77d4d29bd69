"""What a dataset is made of: conversations of one or more prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

Content = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or the messages of a chat."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One request to be sent. `prompt_tokens` is how many the content has by the tokenizer, None where nobody knows;
    `output_tokens` is the most that is asked for."""

    content: Content
    prompt_tokens: int | None
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Prompts sent one after another, each with what was said before it, `pause` seconds after the last answer.

    `at` is when the first is sent, in seconds since the start, where the dataset says so.
    """

    prompts: tuple[Prompt, ...]
    system: str | None = None
    at: float | None = None
    pause: float = 0.0


def alone(content: Content, prompt_tokens: int | None, output_tokens: int, at: float | None = None) -> Conversation:
    """A conversation of one prompt."""
    return Conversation((Prompt(content, prompt_tokens, output_tokens),), at=at)
