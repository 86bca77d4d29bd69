"""The tokens that end an answer: the union of what every file names and of what the chat template writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel

from jaxserve.errors import ConfigError
from jaxserve.model_source import resolve
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

WORDS = ["a", "b", "c"]
SPECIAL = ["<|start|>", "<|of_generation|>", "<|of_config|>", "<|of_text|>", "<|of_tokenizer|>", "<|of_turn|>"]
TURN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"


def turn_with(end: str) -> str:
    return TURN.replace("END", end)


def write(folder: Path, sources: dict[str, dict], *, special: list[str] = SPECIAL) -> None:
    backend = tokenizers.Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in ({"config": {}} | sources).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def end_ids(folder: Path) -> tuple[int, ...]:
    tokenizer = load_tokenizer(resolve(str(folder)))
    template = tokenizer.chat_template
    return tokenizer.eos_ids if template is None else with_template(tokenizer, template).eos_ids


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return tokenizer.with_turn_end(ChatTemplate(template, tokenizer.special_tokens).turn_end())


@pytest.mark.parametrize("named", list(itertools.product([False, True], repeat=5)))
def test_every_source_counts(tmp_path: Path, named: tuple[bool, ...]) -> None:
    generation, config, text_config, tokenizer, turn = named
    vocabulary = {"vocab_size": len(WORDS) + len(SPECIAL)}
    write(
        tmp_path,
        {
            "generation_config": {"eos_token_id": [4]} if generation else {},
            "config": {
                **vocabulary,
                **({"eos_token_id": 5} if config else {}),
                "text_config": vocabulary | ({"eos_token_id": [6, 5]} if text_config else {}),
            },
            "tokenizer_config": {
                **({"eos_token": "<|of_tokenizer|>"} if tokenizer else {}),
                "chat_template": turn_with("<|of_turn|>\n" if turn else "\n"),
            },
        },
    )

    expected = [4] * generation + [5] * config + [6, 5] * text_config + [7] * tokenizer + [8] * turn
    assert end_ids(tmp_path) == tuple(dict.fromkeys(expected))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (turn_with("<|of_turn|>"), (8,)),
        (turn_with("\n  <|of_turn|><|start|>"), (8,)),
        ("{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}", (7,)),
        (turn_with("<|unknown|>"), ()),
        (turn_with(""), ()),
        (turn_with("a<|of_turn|>"), ()),
        ("{{ raise_exception('no') }}", ()),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|of_turn|>{% endfor %}", (8,)),
        ("{{ messages[0].content }}", ()),
    ],
)
def test_the_end_of_a_turn_is_the_special_token_right_after_it(tmp_path: Path, template: str, ends: tuple) -> None:
    write(tmp_path, {})
    tokenizer = load_tokenizer(resolve(str(tmp_path)))
    tokenizer.special_tokens["eos_token"] = "<|of_tokenizer|>"
    assert with_template(tokenizer, template).eos_ids == ends
    assert tokenizer.eos_ids == ()


def test_messages_within_a_turn_of_gpt_oss_do_not_end_it(tmp_path: Path) -> None:
    special = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    template = turn_with("<|end|>")
    sources = {"generation_config": {"eos_token_id": [5, 6]}, "tokenizer_config": {"chat_template": template}}
    write(tmp_path, sources, special=special)
    assert end_ids(tmp_path) == (5, 6)


@pytest.mark.parametrize("source", ["generation_config", "config"])
@pytest.mark.parametrize("token_id", [9, [4, 9], 2**30, -1, "4", 4.5])
def test_an_end_outside_the_vocabulary_is_refused(tmp_path: Path, source: str, token_id: object) -> None:
    sources = {"config": {"vocab_size": 9}}
    sources[source] = sources.get(source, {}) | {"eos_token_id": token_id}
    write(tmp_path, sources)
    with pytest.raises(ConfigError, match="eos_token_id"):
        end_ids(tmp_path)
