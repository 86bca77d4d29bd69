"""Turns the texts of pooled requests into ids: their limits, truncation, and the special tokens around them.

A text that is truncated keeps the tokenizer's special tokens: an embedding may be that of the last one. Knows neither
HTTP nor the engine, and renders nothing; `pair_forms` makes one text of a query and a document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.model_source.pooling import PooledTask
from jaxserve.text.tokenizers.tokenizer import TextEncoder, Tokenizer

TruncationSide = Literal["left", "right"]


@dataclasses.dataclass(frozen=True)
class TextLimits:
    """A text may have `longest` tokens, special ones included. A longer one is an error; if `truncates`, it loses
    tokens at its `side` instead."""

    longest: int
    truncates: bool = False
    side: TruncationSide = "right"

    @classmethod
    def of(
        cls,
        max_model_len: int,
        task: PooledTask,
        truncate_prompt_tokens: int | None,
        side: TruncationSide | None = None,
    ) -> TextLimits:
        """Return the limits of a request; -1 truncates to what the model takes. Raises `InvalidRequestError`."""
        longest = min(max_model_len, task.max_tokens or max_model_len)
        if truncate_prompt_tokens is None:
            return cls(longest)
        if truncate_prompt_tokens != -1 and not 1 <= truncate_prompt_tokens <= longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be in [1, {longest}], the most tokens that this model takes, or -1 for "
                f"these; got {truncate_prompt_tokens}",
                param="truncate_prompt_tokens",
            )
        return cls(longest if truncate_prompt_tokens == -1 else truncate_prompt_tokens, True, side or "right")

    def check(self, num_tokens: int, name: str, *, at_least: bool = False) -> None:
        """Raise `ContextLengthError` for a text that is too long, unless it is truncated; errors call it `name`."""
        if num_tokens > self.longest and not self.truncates:
            raise ContextLengthError(
                f"This model's maximum context length is {self.longest} tokens. However, your {name} resulted in "
                f"{'at least ' if at_least else ''}{num_tokens} tokens. Please reduce the length of the {name}, or "
                "send truncate_prompt_tokens: -1.",
                param=name,
                num_tokens=num_tokens,
            )

    def fit(self, before: Sequence[int], ids: Sequence[int], after: Sequence[int], name: str) -> list[int]:
        """Return all ids; if they are too many, `ids` are truncated. Raises `InvalidRequestError`."""
        room = self.longest - len(before) - len(after)
        if len(ids) > room:
            self.check(len(before) + len(ids) + len(after), name)
            if room < 1:
                raise InvalidRequestError(
                    f"{len(before) + len(after)} tokens stand around the text of {name}, which leaves none for it "
                    f"within {self.longest} tokens; raise truncate_prompt_tokens",
                    param="truncate_prompt_tokens",
                )
            ids = ids[:room] if self.side == "right" else ids[-room:]
        return [*before, *ids, *after]


def encode_texts(
    encoder: TextEncoder,
    texts: Sequence[str],
    around: Sequence[list[int]],
    limits: TextLimits,
    names: Sequence[str],
) -> list[list[int]]:
    """Return the ids of each text, between the special tokens `around` it. Errors call the texts by their `names`."""
    before, after = around
    remaining = iter(names)

    def check_count(count: int) -> None:
        limits.check(count + len(before) + len(after), next(remaining))

    for text, name in zip(texts, names, strict=True):
        limits.check(encoder.min_num_tokens(text), name, at_least=True)
    encoded = encoder.encode_batch(texts, add_special_tokens=False, check_count=check_count)
    return [limits.fit(before, ids, after, name) for ids, name in zip(encoded, names, strict=True)]


def check_not_empty(value: str | list[int], name: str) -> None:
    """Raise `InvalidRequestError` for an empty text, or no ids."""
    if not value:
        raise InvalidRequestError(f"{name} is empty: there must be a text, or at least one token", param=name)


def first_tokens(tokenizer: Tokenizer, text: str, count: int) -> str:
    """Return the beginning of a text, of `count` tokens without special ones, but at least a character."""
    offsets = tokenizer.text_offsets(text, add_special_tokens=False)
    return text if len(offsets) <= count else text[: max(offsets[count], 1)]


def with_prompt(task: PooledTask, texts: Sequence[str], prompt_name: str | None) -> list[str]:
    """Return texts with one of the model's prompts in front, by default its default one.

    Raises `InvalidRequestError` for a name of none; "" means no prompt.
    """
    prompts = dict(task.prompts)
    name = task.default_prompt if prompt_name is None else prompt_name
    if name and name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name: this model has no prompt {name!r}; it has {known}, and '' means no prompt",
            param="prompt_name",
        )
    return [prompts.get(name, "") + text for text in texts]
