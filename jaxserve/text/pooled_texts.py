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
    tokens at its `side` instead. Ids that a client sends do so only if `truncates_ids`."""

    longest: int
    truncates: bool = False
    side: TruncationSide = "right"
    truncates_ids: bool = False

    @classmethod
    def of(
        cls,
        max_model_len: int,
        task: PooledTask,
        truncate_prompt_tokens: int | None,
        side: TruncationSide | None = None,
    ) -> TextLimits:
        """Return the limits of a request; -1 truncates to what the model takes. Raises `InvalidRequestError`.

        As with sentence-transformers, texts are truncated to the model's own limit, unless the context is smaller.
        """
        most, side = task.max_tokens or max_model_len, side or "right"
        if truncate_prompt_tokens is None:
            return cls(min(max_model_len, most), task.max_tokens is not None and most <= max_model_len, side)
        if truncate_prompt_tokens != -1 and not 1 <= truncate_prompt_tokens <= max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be in [1, {max_model_len}], the model's context, or -1 for all that "
                f"it takes; got {truncate_prompt_tokens}",
                param="truncate_prompt_tokens",
            )
        asked = max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        return cls(min(asked, most, max_model_len), True, side, truncates_ids=True)

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
        room = self._room(len(ids), 1, len(before) + len(after), name)
        return [*before, *self._cut(ids, room), *after]

    def fit_ids(self, ids: Sequence[int], name: str) -> list[int]:
        """Return ids that a client sent; if they are too many, they are truncated. Raises `ContextLengthError`."""
        return dataclasses.replace(self, truncates=self.truncates_ids).fit([], ids, [], name)

    def cut_pair(
        self, first: Sequence[int], second: Sequence[int], others: int, name: str
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids of two texts beside which `others` stand. If they are too many, the longer text is truncated
        until both are of a length, as with `longest_first` of transformers. Raises `InvalidRequestError`."""
        room = self._room(len(first) + len(second), 2, others, name)
        shorter = min(len(first), len(second), room // 2)
        kept = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
        return self._cut(first, kept[0]), self._cut(second, kept[1])

    def _room(self, num_tokens: int, num_texts: int, others: int, name: str) -> int:
        """Return how many tokens texts may have beside `others`."""
        room = self.longest - others
        if num_tokens > room:
            self.check(num_tokens + others, name)
            if room < num_texts:
                raise InvalidRequestError(
                    f"{others} tokens stand around the text of {name}, which leaves none for it within {self.longest} "
                    "tokens; raise truncate_prompt_tokens",
                    param="truncate_prompt_tokens",
                )
        return room

    def _cut(self, ids: Sequence[int], room: int) -> Sequence[int]:
        if len(ids) <= room:
            return ids
        return ids[:room] if self.side == "right" else ids[-room:]


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
