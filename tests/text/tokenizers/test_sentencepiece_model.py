from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizers.sentencepiece_model import read_sentencepiece_model
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "text"
CASES = json.loads((FIXTURES / "reference_ids.json").read_text(encoding="utf-8"))["sentencepiece"]
REFERENCE = [(model, case) for model, cases in CASES.items() for case in cases]


def load(folder: Path, model: str, **files: Any) -> Tokenizer:
    """Return the tokenizer of a folder with a tokenizer.model and, by their names without .json, small files."""
    shutil.copyfile(FIXTURES / f"sentencepiece_{model}.model", folder / "tokenizer.model")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer(ModelSource(folder, "folder", "test"))


@pytest.mark.parametrize(("model", "case"), REFERENCE, ids=lambda value: value if isinstance(value, str) else "text")
def test_encodes_and_decodes_as_sentencepiece(tmp_path: Path, model: str, case: dict[str, Any]) -> None:
    tokenizer = load(tmp_path, model)

    ids = tokenizer.encode(case["text"], add_special_tokens=False)

    assert ids == case["ids"]
    assert tokenizer.decode(ids) == case["decoded"]


@pytest.mark.parametrize(("model", "case"), REFERENCE, ids=lambda value: value if isinstance(value, str) else "text")
def test_a_stream_of_its_tokens_has_the_same_text(tmp_path: Path, model: str, case: dict[str, Any]) -> None:
    tokenizer = load(tmp_path, model)
    assert tokenizer.byte_table is not None
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)

    pushed = [detokenizer.push([token_id]) for token_id in case["ids"]]

    assert "".join(pushed) + detokenizer.flush() == case["decoded"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", (1, (2,), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})),
        (
            "gemma",
            (2, (1,), {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}),
        ),
    ],
)
def test_special_tokens_are_those_of_the_model(tmp_path: Path, model: str, expected: tuple[Any, ...]) -> None:
    tokenizer = load(tmp_path, model)

    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_tokens) == expected


def test_the_other_files_have_priority_over_the_model(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        "gemma",
        tokenizer_config={"eos_token": "<end_of_turn>", "add_bos_token": False},
        generation_config={"eos_token_id": [1, 5]},
    )

    assert tokenizer.special_tokens["eos_token"] == "<end_of_turn>"
    assert tokenizer.eos_ids == (1, 5)
    assert tokenizer.encode("<table>")[0] != tokenizer.bos_id


@pytest.mark.parametrize(
    ("config", "first"), [({}, True), ({"add_bos_token": None}, True), ({"add_bos_token": False}, False)]
)
def test_bos_comes_first_unless_the_config_says_no(tmp_path: Path, config: dict[str, bool], first: bool) -> None:
    tokenizer = load(tmp_path, "llama", tokenizer_config=config)
    plain = tokenizer.encode("Hello", add_special_tokens=False)

    assert tokenizer.encode("Hello") == ([1, *plain] if first else plain)


def test_eos_comes_last_if_the_config_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "llama", tokenizer_config={"add_eos_token": True})

    assert tokenizer.encode("Hello")[-1] == 2


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({}, [" a", "[INST]", " a", "[/INST]"]),
        ({"legacy": False}, [" a", "[INST]", "a", "[/INST]"]),
        ({"add_prefix_space": False}, ["a", "[INST]", "a", "[/INST]"]),
    ],
)
def test_the_space_before_a_text(tmp_path: Path, config: dict[str, bool], texts: list[str]) -> None:
    tokenizer = load(tmp_path, "llama", tokenizer_config=config)

    assert [tokenizer.token_text(one) for one in tokenizer.encode("a[INST]a[/INST]")[1:]] == texts


def test_control_tokens_are_skipped_and_user_defined_ones_are_shown(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "gemma")

    ids = tokenizer.encode("<start_of_turn><table>\n\n   x<end_of_turn>")

    assert [tokenizer.token_text(one) for one in ids[1:5]] == ["<start_of_turn>", "<table>", "\n\n", "   "]
    assert tokenizer.decode(ids) == "<table>\n\n   x"


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    size = len(read_sentencepiece_model(FIXTURES / "sentencepiece_llama.model").pieces)
    added = {
        "3": {"content": "<renamed>", "special": True},
        str(size + 1): {"content": "<tool>", "special": False},
        str(size): {"content": "<|end|>", "special": True, "rstrip": True},
    }
    tokenizer = load(tmp_path, "llama", tokenizer_config={"added_tokens_decoder": added, "eos_token": "<|end|>"})

    ids = tokenizer.encode("<renamed><|end|> \n<tool>", add_special_tokens=False)

    assert ids == [3, size, size + 1]
    assert tokenizer.decode(ids) == "<tool>"
    assert tokenizer.eos_ids == (size,)


def test_added_tokens_of_an_older_folder(tmp_path: Path) -> None:
    size = len(read_sentencepiece_model(FIXTURES / "sentencepiece_llama.model").pieces)
    tokenizer = load(
        tmp_path,
        "llama",
        added_tokens={"<|im_start|>": size, "<tool>": size + 1},
        special_tokens_map={"additional_special_tokens": ["<|im_start|>"]},
    )

    assert tokenizer.encode("<|im_start|><tool>", add_special_tokens=False) == [size, size + 1]
    assert {size, size + 1} & tokenizer.skipped_ids == {size}


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"9999": {"content": "x"}}, "names 'x' as token 9999, but the last token before it is 599"),
        ({"600": {"special": True}}, "names '' as token 600"),
        ({"one": {"content": "x"}}, "one should be a whole number"),
        ({"600": "x"}, "600 should be an object"),
        ([1], "added_tokens_decoder should be an object"),
    ],
)
def test_added_tokens_that_make_no_sense(tmp_path: Path, added: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "llama", tokenizer_config={"added_tokens_decoder": added})


def test_a_tokenizer_json_has_priority(tmp_path: Path) -> None:
    load(tmp_path, "gemma")._backend.save(str(tmp_path / "tokenizer.json"))

    assert load(tmp_path, "llama", tokenizer_config={"bos_token": "<bos>"}).bos_id == 2


def test_a_unigram_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"type Unigram, only BPE is supported\. Add the model's tokenizer\.json"):
        _read(tmp_path, b"\x0a\x03\x0a\x01a\x12\x02\x18\x01")


@pytest.mark.parametrize(
    "data", [b"", b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff", b"\x0a", b"\x0b\x01", b"\x0a\x02\x10\x01", b"\xff" * 30]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"can't be read as a SentencePiece model.*tiktoken's format"):
        _read(tmp_path, data)


@pytest.mark.parametrize("model", CASES)
def test_no_cut_or_changed_byte_raises_another_error(tmp_path: Path, model: str) -> None:
    data = (FIXTURES / f"sentencepiece_{model}.model").read_bytes()
    damaged = [data[:cut] for cut in range(0, len(data), 397)]
    damaged += [data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :] for at in range(0, len(data), 389)]

    for each in damaged:
        (tmp_path / "tokenizer.model").write_bytes(each)
        try:
            load_tokenizer(ModelSource(tmp_path, "folder", "test")).decode([5, 6, 300])
        except ConfigError:
            continue


def _read(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.model").write_bytes(data)
    read_sentencepiece_model(folder / "tokenizer.model")
