from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.text.tokenizers.gguf_tokenizer import _SPLITS
from jaxserve.text.tokenizers.sentencepiece_model import read_sentencepiece_model
from jaxserve.text.tokenizers.token_bytes import byte_alphabet
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.model_source.gguf_files import write_gguf

FIXTURES = Path(__file__).parents[2] / "fixtures" / "text"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
BYTES = list(byte_alphabet().values())


def load(path: Path, values: dict[str, Any]) -> Tokenizer:
    file = write_gguf(path / "m.gguf", values={f"tokenizer.{key}": value for key, value in values.items()})
    return load_tokenizer(ModelSource(file, "gguf", "test"))


def byte_level(path: Path, pre: str | None, merges: tuple[str, ...] = ("Z Z",), **values: Any) -> Tokenizer:
    """Return a tokenizer of all bytes, the results of `merges`, and two added tokens at the end."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), "<end>", "<mark>"]
    types = [*[NORMAL] * (len(tokens) - 2), CONTROL, USER_DEFINED]
    keys: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": list(merges),
    }
    if pre is not None:
        keys["ggml.pre"] = pre
    return load(path, keys | {key.replace("__", "."): value for key, value in values.items()})


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the words into which the pre-tokenizer splits a text."""
    backend: Backend = tokenizer._backend
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(normalized)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "Don|'t| pay| 1234|.|50| –| IT|'|S|  | ok|!!|\n|\n|x"),
        ("smollm", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'|S|  | ok|!!|\n|\n|x"),
        ("llama-bpe", "Don|'t| pay| |123|4|.|50| –| IT|'S|  | ok|!!\n\n|x"),
        ("qwen2", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'S|  | ok|!!\n\n|x"),
        ("qwen35", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'S|  | ok|!!\n\n|x"),
        ("tekken", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'S|  | ok|!!\n\n|x"),
        ("smaug-bpe", "Don|'t| pay| |123|4|.|50| –| IT|'S|  | ok|!!\n\n|x"),
        ("dbrx", "Don|'t| pay| |123|4|.|50| –| IT|'S|  | ok|!!\n\n|x"),
        ("glm4", "Don|'t| pay| |123|4|.|50| –| IT|'S|  | ok|!!\n\n|x"),
        ("gpt-4o", "Don't| pay| |123|4|.|50| –| IT'S|  | ok|!!\n\n|x"),
        ("minimax-m2", "Don't| pay| |123|4|.|50| –| IT'S|  | ok|!!\n\n|x"),
        ("seed-coder", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'S|  | ok|!!|\n\n|x"),
        ("command-r", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'|S|  | ok|!!|\n|\n|x"),
        ("refact", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'|S|  | ok|!!|\n|\n|x"),
        ("starcoder", "Don|'t| pay| |1|2|3|4|.|5|0| –| IT|'|S|  | ok|!!|\n|\n|x"),
        ("exaone4", "Don|'t| pay| 1234|.|50| –| IT|'|S|  | ok|!!|\n|\n|x"),
        ("deepseek-v3", "Don|'t| pay| |123|4|.|50| –| IT|'S|  | ok|!!\n\n|x"),
        (None, "Don|'|t| pay| |123|4|.|50| |–| IT|'|S|  | ok|!!|\n|\n|x"),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(tmp_path: Path, pre: str | None, expected: str) -> None:
    assert words(byte_level(tmp_path, pre), "Don't pay 1234.50 – IT'S   ok!!\n\nx") == expected.split("|")


def test_deepseek_splits_chinese_and_marks_before_words(tmp_path: Path) -> None:
    found = words(byte_level(tmp_path, "deepseek-v3"), "the 東京タワー, (see f(x)).")
    assert found == ["the", " ", "東京タワー", ",", " (", "see", " f", "(x", "))."]


def test_the_marks_of_letters_may_be_in_their_words(tmp_path: Path) -> None:
    """The Devanagari word has three marks."""
    text = "नमस्ते x"
    assert words(byte_level(tmp_path, "qwen35"), text) == ["नमस्ते", " x"]
    assert len(words(byte_level(tmp_path, "qwen2"), text)) == 4


@pytest.mark.parametrize("pre", _SPLITS)
def test_no_pre_tokenizer_loses_text(tmp_path: Path, pre: str) -> None:
    text = "Straße, 東京 №7½: नमस्ते 👩‍👩‍👧\r\n\t x  "
    tokenizer = byte_level(tmp_path, pre)

    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "command-r"])
def test_some_models_normalize_to_composed_characters(tmp_path: Path, pre: str) -> None:
    assert byte_level(tmp_path, pre).encode("e\u0301") == byte_level(tmp_path, pre).encode("é")
    assert byte_level(tmp_path, "gpt-2").encode("e\u0301") != byte_level(tmp_path, "gpt-2").encode("é")


def test_merges_and_added_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2", ("l l", "h e", "he ll", "Ġ w"))
    tokens = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("hello well<mark><end>")]

    assert tokens == ["hell", "o", " w", "e", "ll", "<mark>", "<end>"]
    ids = tokenizer.encode("a<mark><end>")
    assert tokenizer.decode(ids) == "a<mark>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<mark><end>"


def test_merges_are_ignored_for_whole_words_if_the_model_does_so(tmp_path: Path) -> None:
    merges = ["e l", "h el", "l o", "he l"]  # two merges make "hel", none makes "hell"
    tokens = [*BYTES, "el", "hel", "lo", "hello", "<end>"]
    keys = {"ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.merges": merges[:3]}

    found = {pre: load(tmp_path, keys | {"ggml.pre": pre}).encode("hello") for pre in ("gpt-2", "llama-bpe")}

    assert [tokens[token_id] for token_id in found["llama-bpe"]] == ["hello"]
    assert [tokens[token_id] for token_id in found["gpt-2"]] == ["hel", "lo"]


def test_bos_and_eos(tmp_path: Path) -> None:
    end = 257
    tokenizer = byte_level(tmp_path, "llama-bpe", ggml__bos_token_id=end, ggml__eos_token_id=end, ggml__eot_token_id=5)

    assert tokenizer.encode("a")[0] == end  # Llama 3's files don't say so
    assert tokenizer.eos_ids == (end, 5)
    assert tokenizer.special_tokens == {"bos_token": "<end>", "eos_token": "<end>"}
    explicit = byte_level(
        tmp_path, "llama-bpe", ggml__bos_token_id=end, ggml__add_bos_token=False, ggml__eos_token_id=2**32 - 1
    )
    assert explicit.encode("a") == [BYTES.index("a")]
    assert explicit.eos_ids == ()


def test_end_of_turn_tokens_end_a_generation(tmp_path: Path) -> None:
    keys = {
        "ggml.model": "gpt2",
        "ggml.tokens": [*BYTES, "<end>", "<|eot_id|>"],
        "ggml.merges": ["a b"],
        "ggml.eos_token_id": 256,
    }
    keys["ggml.tokens"].append("ab")  # type: ignore[attr-defined]

    assert load(tmp_path, keys).eos_ids == (256, 257)


def test_the_end_of_a_message_of_gpt_oss_does_not_end_its_turn(tmp_path: Path) -> None:
    tokens = [*BYTES, "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"]
    keys = {"ggml.model": "gpt2", "ggml.merges": ["a b"], "ggml.eos_token_id": 257}
    assert load(tmp_path, keys | {"ggml.tokens": [*tokens, "ab"]}).eos_ids == (257, 256, 259)
    assert load(tmp_path, keys | {"ggml.tokens": [*tokens[:-1], "ab"]}).eos_ids == (257, 258)


def test_chat_template(tmp_path: Path) -> None:
    assert byte_level(tmp_path, "gpt-2", chat_template="{{ messages }}").chat_template == "{{ messages }}"
    assert byte_level(tmp_path, "gpt-2").chat_template is None


def test_named_chat_templates(tmp_path: Path) -> None:
    templates = {"chat_template": "usual", "chat_templates": ["rag"], "chat_template.rag": "with documents"}

    tokenizer = load(tmp_path, sentencepiece_keys() | templates)

    assert tokenizer.chat_templates == {"default": "usual", "rag": "with documents"}


def sentencepiece_keys() -> dict[str, Any]:
    """Return pieces in an order that differs from that of their scores, which decide the merges."""
    made = {"el": -6.0, "llo": -5.0, "ll": -4.0, "he": -2.0, "▁h": -3.0, "▁he": -1.0}
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *made, *"▁helo"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(made) + 5)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": pieces,
        "ggml.scores": [*[0.0] * 259, *made.values(), *[-9.0] * 5],
        "ggml.token_type": types,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_keys())

    ids = tokenizer.encode("hello é")

    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert texts == ["<s>", " he", "llo", " ", r"bytes:\xc3", r"bytes:\xa9"]
    assert tokenizer.decode(ids) == "hello é"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_keys() | {"ggml.add_space_prefix": False, "ggml.add_bos_token": False})

    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("hello")] == ["he", "llo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def fixture_keys(name: str) -> dict[str, Any]:
    """Return a model of tests/fixtures as llama.cpp's converter writes it."""
    model = read_sentencepiece_model(FIXTURES / f"sentencepiece_{name}.model")
    return {
        "ggml.model": "llama",
        "ggml.tokens": [p.text.replace("▁", " ") if p.kind == USER_DEFINED else p.text for p in model.pieces],
        "ggml.scores": [piece.score for piece in model.pieces],
        "ggml.token_type": [int(piece.kind) for piece in model.pieces],
        "ggml.add_space_prefix": model.adds_space_prefix,
        "ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_sentencepiece_models_encode_and_decode_as_sentencepiece(tmp_path: Path, name: str) -> None:
    tokenizer = load(tmp_path, fixture_keys(name))

    for case in json.loads((FIXTURES / "reference_ids.json").read_text(encoding="utf-8"))["sentencepiece"][name]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]


def test_gemma_finds_its_control_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, fixture_keys("gemma"))

    ids = tokenizer.encode("<start_of_turn>a\n\n    b<table><end_of_turn>")

    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert texts == ["<start_of_turn>", "a", "\n\n", "    ", "b", "<table>", "<end_of_turn>"]
    assert tokenizer.decode(ids) == "a\n\n    b<table>"
    assert tokenizer.eos_ids == (ids[-1],)


@pytest.mark.parametrize(("architecture", "kept"), [("llama", [" ", "\n"]), ("phi3", [])])
def test_tokens_of_phi3_swallow_the_space_after_them(tmp_path: Path, architecture: str, kept: list[str]) -> None:
    values = {f"tokenizer.{key}": value for key, value in fixture_keys("llama").items()}
    file = write_gguf(tmp_path / "m.gguf", architecture, values=values)

    tokenizer = load_tokenizer(ModelSource(file, "gguf", "test"))

    texts = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("[INST]\n[/INST]<s> <s>")]
    assert texts == ["[INST]", *kept, "[/INST]", "<s>", " ", " ", "<s>"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ggml.model": "rwkv", "ggml.tokens": ["a"]}, "tokenizer model 'rwkv' is not supported"),
        ({"ggml.model": "bert", "ggml.tokens": ["a"], "ggml.token_type": [1, 1]}, "token_type should be a number for"),
        (
            {"ggml.model": "gpt2", "ggml.tokens": ["a"], "ggml.pre": "kimi-k2"},
            "pre-tokenizer 'kimi-k2' is not supported",
        ),
        ({"ggml.model": "gpt2"}, r"has no tokenizer\.ggml\.tokens"),
        ({"ggml.model": "gpt2", "ggml.tokens": ["a"]}, r"has no tokenizer\.ggml\.merges"),
        ({"ggml.model": "gpt2", "ggml.tokens": ["a"], "ggml.merges": ["a b"]}, "tokenizer is inconsistent"),
        ({"ggml.model": "llama", "ggml.tokens": ["a"]}, r"tokenizer\.ggml\.scores is missing"),
    ],
)
def test_unsupported_files_are_refused_with_a_reason(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, values)
