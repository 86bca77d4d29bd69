"""The contents of a dataset: conversations of one or more prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

Content = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or the messages of a chat."""


@dataclasses.dataclass(frozen=True, slots=True)
class DatasetPrompt:
    """One request to send. `prompt_tokens` is the tokenizer's count for the content, without a chat's template, and
    None if unknown; `output_tokens` is the request's max_tokens."""

    content: Content
    prompt_tokens: int | None
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class BenchConversation:
    """Prompts sent one after another, each with the turns before it, `pause` seconds after the previous answer.

    `at` is when the first is sent, in seconds since the start, if the dataset has arrival times.
    """

    prompts: tuple[DatasetPrompt, ...]
    system: str | None = None
    at: float | None = None
    pause: float = 0.0


def single_prompt(
    content: Content, prompt_tokens: int | None, output_tokens: int, at: float | None = None
) -> BenchConversation:
    """Return a conversation of one prompt."""
    return BenchConversation((DatasetPrompt(content, prompt_tokens, output_tokens),), at=at)
