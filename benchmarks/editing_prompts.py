"""Prompts whose answers repeat much of the prompt: edits and summaries of short texts and programs.

The texts are in `editing_passages.txt`, each after a line with a word of it and the word to put in its place. A small
model follows such instructions badly, but it does write the text again. An answer may have about a fifth more tokens
than its text, because a model that never ends an answer soon only repeats itself.

    python -m benchmarks.editing_prompts editing.jsonl
    jaxserve bench serve --backend openai-chat --dataset-name custom --dataset-path editing.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

PASSAGES = Path(__file__).with_name("editing_passages.txt")
MAX_OUTPUT_TOKENS = 300
NUM_PAIRS = 6


@dataclasses.dataclass(frozen=True)
class EditingPrompt:
    """A prompt, the form that it has, and the most tokens of its answer."""

    form: str
    prompt: str
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class Passage:
    """A text, and a word of it to be replaced."""

    text: str
    old: str
    new: str

    @property
    def is_code(self) -> bool:
        return self.text.startswith("```")


def editing_prompts() -> list[EditingPrompt]:
    """Return all 48 prompts, form after form."""
    return list(_prompts(read_passages()))


def write_prompts(path: Path, prompts: Sequence[EditingPrompt]) -> None:
    """Write JSON lines that `bench serve --dataset-name custom` reads."""
    path.write_text("".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts))


def read_passages() -> list[Passage]:
    """Read the texts."""
    passages = []
    for part in PASSAGES.read_text(encoding="utf-8").strip().split("\n===\n"):
        words, text = part.split("\n", 1)
        old, new = words.split(" -> ")
        passages.append(Passage(text, old, new))
    return passages


def misspell(text: str) -> str:
    """Swap two letters in some of the words."""
    words = text.split(" ")
    for i in range(4, len(words), 9):
        if len(words[i]) > 4 and words[i].isalpha():
            words[i] = words[i][0] + words[i][2] + words[i][1] + words[i][3:]
    return " ".join(words)


def _prompts(passages: list[Passage]) -> Iterator[EditingPrompt]:
    prose = [passage for passage in passages if not passage.is_code]
    code = [passage for passage in passages if passage.is_code]
    for passage in prose:
        task = f'Repeat the following text, but with the word "{passage.old}" replaced by "{passage.new}":'
        yield _prompt("replace a word", task, passage.text)
    for passage in prose:
        task = "Fix the spelling of the following text, and change nothing else:"
        yield _prompt("fix the spelling", task, misspell(passage.text))
    for passage in prose:
        task = "Quote the most important sentences of the following text exactly as they are:"
        yield _prompt("quote sentences", task, passage.text)
    for first, second in list(zip(prose, prose[4:]))[:NUM_PAIRS]:
        task = "Summarize the following texts as a list of bullet points, in the words of the texts:"
        yield _prompt("summarize two texts", task, f"{first.text}\n\n{second.text}")
    for passage in code:
        task = f"Rename `{passage.old}` to `{passage.new}` in this code, and show the whole code:"
        yield _prompt("rename a variable", task, passage.text)
    for passage in code:
        yield _prompt("comment code", "Add comments to this code, and show the whole code:", passage.text)


def _prompt(form: str, task: str, text: str) -> EditingPrompt:
    characters_per_token = 3 if text.startswith("```") else 4
    return EditingPrompt(form, f"{task}\n\n{text}", min(len(text) // characters_per_token, MAX_OUTPUT_TOKENS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="file to write")
    write_prompts(parser.parse_args().output, editing_prompts())


if __name__ == "__main__":
    main()
