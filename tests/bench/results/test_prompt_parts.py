from __future__ import annotations

from dataclasses import replace

from jaxserve.bench.load.records import RequestRecord
from jaxserve.bench.results.prompt_parts import PromptParts, prompt_parts


def record(prompt_tokens: int | None, text: str = "", **changes: object) -> RequestRecord:
    made = RequestRecord("r", 3, prompt_tokens, status="ok", text=text)
    return replace(made, **changes)  # type: ignore[arg-type]


def count(text: str) -> int:
    return len(text.split())


def test_earlier_answers_are_neither_the_datasets_nor_the_templates() -> None:
    records = [record(15, "two words"), record(27, "and three words"), record(40), record(11)]
    parts = prompt_parts(records, [[10, 18, 26], [8]], count)
    assert parts == PromptParts(4, dataset=62, answers=2 + 5, template=5 + (27 - 20) + (40 - 31) + 3)
    assert parts.describe().startswith(
        "62 tokens of the dataset, 7 of earlier answers, 24 of the chat template (6.0 per"
    )
    assert sum(parts.as_json().values()) == sum(each.prompt_tokens or 0 for each in records)


def test_only_what_the_server_counted_is_taken_apart() -> None:
    records = [record(9), record(9, status="failed"), record(9, counted_by="tokenizer"), record(None), record(9)]
    assert prompt_parts(records, [[5], [5], [5], [5], [None]], count) == PromptParts(1, 5, 0, 4)
    assert prompt_parts(records[1:], [[5], [5], [5], [None]], count) is None
