"""Reads prompts from files: ShareGPT's JSON, and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.datasets.conversations import as_conversation
from jaxserve.bench.datasets.prompts import BenchConversation, Content, single_prompt
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError

_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOKENS = 2048


def sharegpt(
    path: Path, vocabulary: Vocabulary, rng: np.random.Generator, count: int, *, output_len: int | None
) -> Iterator[BenchConversation]:
    """Yield the first prompt of each ShareGPT conversation; it asks for as many tokens as its first answer has.

    Prompts of more than 1,024 tokens, more than 2,048 with the answer, or fewer than 4 are skipped, as vLLM's and
    SGLang's tools do.
    """
    for human, answer in _first_turns(path, rng):
        prompt_tokens = vocabulary.count(human)
        output = output_len or vocabulary.count_answer(answer)
        short = prompt_tokens < _MIN_TOKENS or (output < _MIN_TOKENS and output_len is None)
        if short or prompt_tokens > _MAX_PROMPT_TOKENS or prompt_tokens + output > _MAX_TOKENS:
            continue
        if count <= 0:
            return
        count -= 1
        yield single_prompt(human, prompt_tokens, output)


def sharegpt_turns(
    path: Path, rng: np.random.Generator, count: int, *, turns: int, output_len: int, pause: float
) -> Iterator[BenchConversation]:
    """Yield ShareGPT conversations of up to `turns` prompts each, `count` prompts in total."""
    for conversation in _shuffled(_sharegpt_entries(path), rng):
        texts = [text for role, text in conversation if role in ("human", "user")][: min(turns, count)]
        if texts:
            yield as_conversation(texts, output_len, pause=pause)
            count -= len(texts)
        if count <= 0:
            return


def custom(
    path: Path, rng: np.random.Generator, *, output_len: int, chat: bool, shuffle: bool
) -> Iterator[BenchConversation]:
    """Yield the prompts of lines `{"prompt": text or ids}` or `{"messages": […]}`, with the line's `output_tokens` or
    else `output_len`. The length of a text in tokens is unknown here. Raises `ConfigError` that names the line."""
    entries = list(enumerate(json_lines(path), start=1))
    for number, line in _shuffled(entries, rng) if shuffle else entries:
        content = _content(line, f"{path}, line {number}", chat)
        output = line.get("output_tokens", output_len)
        if not isinstance(output, int) or output < 1:
            raise ConfigError(f"{path}, line {number}: output_tokens must be a whole number above 0, got {output!r}")
        is_ids = isinstance(content, list) and not _is_messages(content)
        yield single_prompt(content, len(content) if is_ids else None, output)


def _content(line: dict[str, Any], where: str, chat: bool) -> Content:
    prompt = line.get("prompt", line.get("messages"))
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(f'{where} has neither "prompt" (a text or token ids) nor "messages"')
    if _is_messages(prompt) != chat:
        kind, backend = ("messages", "openai-chat") if not chat else ("token ids", "openai")
        raise ConfigError(f"{where} holds {kind}, which only --backend {backend} can send")
    return prompt


def _is_messages(prompt: list[Any]) -> bool:
    return isinstance(prompt[0], dict)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. Raises `ConfigError` that names the line."""
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(value, dict):
                raise ConfigError(f"{path}, line {number} should hold an object, it holds a {type(value).__name__}")
            yield value


def _first_turns(path: Path, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
    for conversation in _shuffled(_sharegpt_entries(path), rng):
        if len(conversation) >= 2:
            yield conversation[0][1], conversation[1][1]


def _sharegpt_entries(path: Path) -> list[list[tuple[str, str]]]:
    try:
        entries = json.loads(_read(path))
        return [
            [(turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))) for turn in turns]
            for entry in entries
            if (turns := entry.get("conversations", entry.get("conversation")))
        ]
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f'{path} is not a ShareGPT file, a JSON list of {{"conversations": [{{"from", "value"}}, …]}}: {error}'
        ) from error


def _shuffled[T](entries: list[T], rng: np.random.Generator) -> list[T]:
    return [entries[i] for i in rng.permutation(len(entries))]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path: {path} can't be read: {error}") from error
