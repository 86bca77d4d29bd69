from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.model_source import ModelSource
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.text import small_tokenizers

FIXTURES = Path(__file__).parents[2] / "fixtures" / "text"
CASES = json.loads((FIXTURES / "reference_ids.json").read_text(encoding="utf-8"))["tekken"]
CONTENT = json.loads((FIXTURES / "tekken.json").read_text(encoding="utf-8"))


def load(folder: Path, content: Any = CONTENT) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(content))
    return load_tokenizer(ModelSource(folder, "folder", "test"))


def changed(config: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the file with other fields, or without those that are None."""
    content = copy.deepcopy(CONTENT) | fields
    content["config"] |= config or {}
    return {name: value for name, value in content.items() if value is not None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:12])
def test_encodes_and_decodes_as_mistral_common(tmp_path: Path, case: dict[str, Any]) -> None:
    tokenizer = load(tmp_path)

    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    assert "".join(detokenizer.push([one]) for one in case["ids"]) + detokenizer.flush() == case["text"]


def test_special_tokens_have_the_first_ids(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)

    assert tokenizer.encode("[INST]<pad>[THINK]<SPECIAL_29>", add_special_tokens=False) == [3, 5, 6, 29]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_older_files_name_no_special_tokens(tmp_path: Path, version: str) -> None:
    tokenizer = load(tmp_path, changed({"version": version}, special_tokens=None))

    assert tokenizer.encode("[INST][/INST][TOOL_CALLS][SYSTEM_PROMPT]<SPECIAL_20>") == [1, 3, 4, 9, 17, 20]


def test_tokens_beyond_the_vocabulary_of_the_config_are_not_used(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, changed({"default_vocab_size": 30 + 256}))

    assert tokenizer.vocab_size == 286
    assert tokenizer.encode("Hi", add_special_tokens=False) == [30 + ord("H"), 30 + ord("i")]


def test_a_word_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    word = {"rank": len(CONTENT["vocab"]), "token_bytes": "ZHp4enFq", "token_str": "dzxzqj"}
    size = 30 + len(CONTENT["vocab"]) + 1
    tokenizer = load(tmp_path, changed({"default_vocab_size": size}, vocab=[*CONTENT["vocab"], word]))

    assert tokenizer.encode("dzxzqj", add_special_tokens=False) == [size - 1]


def test_a_tokenizer_json_has_priority_and_the_config_decides_about_bos(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert load(tmp_path).encode("[INST]") == [3]
    small_tokenizers.words()._backend.save(str(tmp_path / "tokenizer.json"))

    assert load(tmp_path).encode("hello world") == [3, 4]


def test_chat_without_a_template_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)

    with pytest.raises(InvalidRequestError, match="start with --chat-template FILE"):
        chat.render([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(special_tokens=None), "a file of version 'v11' should have special_tokens"),
        (changed(config={"default_num_special_tokens": 3}), "below default_num_special_tokens"),
        (changed(special_tokens=[{"rank": 0, "token_str": "a"}] * 2), "at most once"),
        (changed(special_tokens=5), "special_tokens should be a list of objects"),
        (changed(vocab=None), "vocab should be a list of tokens with token_bytes"),
        (changed(vocab=[]), "vocab should list its tokens by rank"),
        (changed({"default_vocab_size": 32}, vocab=[{"token_bytes": "AA=="}] * 2), "there twice"),
        (changed(vocab=[{"token_bytes": 5}]), "vocab should be a list of tokens"),
        (changed(config={"default_vocab_size": 30}), r"default_vocab_size should be in \[31, "),
        (changed(config={"default_vocab_size": 10**6}), r"default_vocab_size should be in \[31, "),
        (changed(config={"pattern": "("}), r"config\.pattern is no regular expression"),
        ({"vocab": CONTENT["vocab"]}, "default_num_special_tokens is missing"),
    ],
)
def test_damaged_files_are_refused_with_a_reason(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, content)
