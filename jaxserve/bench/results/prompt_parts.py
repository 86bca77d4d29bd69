"""The parts of the prompt tokens of chats: the dataset's texts, earlier answers, and the template around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxserve.bench.load.records import RequestRecord

_COUNTED = ("ok", "usage")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptParts:
    """Tokens of `requests` prompts in all. `template` is what the server counts beyond `dataset` and `answers`: roles,
    BOS, a default system message, tools."""

    requests: int
    dataset: int
    answers: int
    template: int

    def describe(self) -> str:
        """Return one line."""
        answers = f", {self.answers} of earlier answers" if self.answers else ""
        each = f" ({self.template / self.requests:.1f} per request)"
        return f"{self.dataset} tokens of the dataset{answers}, {self.template} of the chat template{each}"

    def as_json(self) -> dict[str, int]:
        """Return the sums under their keys in the result."""
        return {
            "dataset_input_tokens": self.dataset,
            "answer_input_tokens": self.answers,
            "template_input_tokens": self.template,
        }


def prompt_parts(
    records: Sequence[RequestRecord], lengths: Sequence[Sequence[int | None]], count: Callable[[str], int]
) -> PromptParts | None:
    """Return the parts of the chats that succeeded; None if the server counted none, or their texts are unknown.

    `lengths` are the dataset's tokens in the requests of each conversation (`request_lengths`); `count` counts the
    tokens of an answer.
    """
    left = iter(records)
    parts = []
    for of_turns in lengths:
        earlier: list[str] = []
        for own in of_turns:
            record = next(left)
            if own is not None and record.prompt_tokens is not None and (record.status, record.counted_by) == _COUNTED:
                answers = sum(map(count, earlier))
                parts.append((own, answers, record.prompt_tokens - own - answers))
            earlier.append(record.text)
    return PromptParts(len(parts), *map(sum, zip(*parts))) if parts else None
