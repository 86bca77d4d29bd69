from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.model_source import ModelSource, resolve
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.selection import examples
from tests.text import small_tokenizers
from tests.text.small_tokenizers import SCRIPTS

FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "text" / "smollm2_ids.json").read_text(encoding="utf-8"))

byte_level = functools.cache(small_tokenizers.byte_level)
sentencepiece = functools.cache(small_tokenizers.sentencepiece)
words = functools.cache(small_tokenizers.words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a Hugging Face folder with a tokenizer whose BOS is <bos>; tests add its other JSON files."""
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}})
    write(tmp_path, "config.json", {})
    return tmp_path


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource(folder, "folder", "test"))


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def test_every_script_round_trips(make: functools.partial[Tokenizer], text: str) -> None:
    assert make().decode(make().encode(text)) == text


@settings(max_examples=examples(300))
@given(ids=st.lists(st.integers(0, 500), max_size=30), skip=st.booleans())
def test_token_bytes_are_what_the_backend_decodes(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    assert tokenizer.byte_table is not None

    shown = [token_id for token_id in ids if not skip or token_id not in tokenizer.skipped_ids]

    joined = b"".join(tokenizer.byte_table[token_id] for token_id in shown).decode(errors="replace")
    assert joined == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(300))
@given(parts=st.lists(st.text(max_size=10) | st.sampled_from(["<bos>", "<eos>"]), max_size=5), skip=st.booleans())
def test_byte_fallback_decodes_valid_text_like_the_backend(parts: list[str], skip: bool) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("".join(parts))

    assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_keeps_the_valid_part_of_an_invalid_run() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer._backend.token_to_id(f"<0x{value:02X}>") for value in [*"é".encode(), 0xFF, *"字".encode()[:2]]]

    assert tokenizer.decode(ids) == "é\ufffd\ufffd"


def test_a_token_as_text_and_bytes() -> None:
    tokenizer = byte_level()
    half = tokenizer._backend.token_to_id("Ã")
    end = tokenizer.eos_ids[0]

    assert (tokenizer.token_text(half), tokenizer.token_bytes(half)) == (r"bytes:\xc3", b"\xc3")
    assert (tokenizer.token_text(end), tokenizer.token_bytes(end)) == ("<eos>", b"<eos>")
    assert sentencepiece().token_text(sentencepiece()._backend.token_to_id("▁w")) == " w"
    assert (words().token_text(3), words().token_bytes(3)) == ("hello", b"hello")


def test_invalid_ids_and_texts_are_refused() -> None:
    for tokenizer in (byte_level(), words()):
        with pytest.raises(InvalidRequestError, match="token ids must be in"):
            tokenizer.decode([-1])
        with pytest.raises(InvalidRequestError, match="half a surrogate pair"):
            tokenizer.encode("a\ud800")
        with pytest.raises(InvalidRequestError, match="half a surrogate pair"):
            tokenizer.encode_batch(["a", "a\ud800"])
    with pytest.raises(InvalidRequestError, match="token ids must be in"):
        sentencepiece().decode([-1])


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    for tokenizer in (byte_level(), sentencepiece(), words()):
        assert tokenizer.decode([tokenizer.vocab_size + 10]) == ""
        assert not tokenizer.has_token(tokenizer.vocab_size + 10)


def test_a_batch_equals_the_texts_one_by_one() -> None:
    assert byte_level().encode_batch(SCRIPTS) == [byte_level().encode(text) for text in SCRIPTS]


def test_truncation_and_padding_of_the_file_are_disabled(folder: Path) -> None:
    backend = small_tokenizers.byte_level()._backend
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))

    assert load(folder).decode(load(folder).encode("Hello world")) == "Hello world"
    assert len(load(folder).encode("Hello world")) < 20


def test_special_tokens_of_a_folder(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"pad_token": "<eos>", "bos_token": "<eos>"})
    tokenizer = load(folder)

    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))


def test_tokenizer_config_decides_about_bos_and_eos(folder: Path) -> None:
    plain = load(folder).encode("Hello")
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}

    write(folder, "tokenizer_config.json", settings | {"add_bos_token": True})
    assert load(folder).encode("Hello") == [0, *plain]
    assert load(folder).encode("Hello", add_special_tokens=False) == plain
    load(folder)._backend.save(str(folder / "tokenizer.json"))
    load_with_bos = load(folder)
    write(folder, "tokenizer_config.json", settings | {"add_eos_token": True})
    load_with_bos._backend.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("Hello") == [0, *plain, 1]
    write(folder, "tokenizer_config.json", settings | {"add_bos_token": False})
    assert load(folder).encode("Hello") == plain


def test_every_place_of_the_chat_template(folder: Path) -> None:
    assert load(folder).chat_template is None
    write(folder, "tokenizer_config.json", {"chat_template": "one"})
    assert load(folder).chat_template == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert load(folder).chat_template == "usual"
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder).chat_template == "file"
    assert load(folder).chat_templates == {"default": "file", "tool_use": "tools"}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_the_error_names_an_invalid_file(folder: Path, name: str) -> None:
    (folder / name).write_text("{broken")

    with pytest.raises(ConfigError, match=f"{name} can't be read"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "says"),
    [("llama", r"has no tokenizer\.json"), ("bert", r"none of vocab\.txt"), ("qwen2", r"none of vocab\.json")],
)
def test_a_folder_without_a_tokenizer(model_type: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": model_type})

    with pytest.raises(ConfigError, match=says):
        load(tmp_path)


def test_loading_a_folder_imports_neither_jax_nor_transformers(folder: Path) -> None:
    code = (
        "import sys, json, pathlib; from jaxserve.text.output import OutputProcessor\n"
        "from jaxserve.text.tokenizers.tokenizer import load_tokenizer; from jaxserve.model_source import resolve\n"
        "from jaxserve.text.chat_template import ChatTemplate\n"
        f"load_tokenizer(resolve({str(folder)!r})); print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    assert not {"jax", "numpy", "gguf", "huggingface_hub", "transformers", "torch"} & set(loaded)


@pytest.mark.slow
def test_the_default_model_encodes_as_hugging_face() -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL))

    for case in FIXTURE["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def test_text_offsets_are_the_starts_of_tokens(make: functools.partial[Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    offsets = tokenizer.text_offsets(text)

    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets):
        piece = tokenizer.token_text(token_id)
        if token_id not in tokenizer.skipped_ids and not piece.startswith("bytes:"):
            assert text.startswith((piece, piece.removeprefix(" ")), offset)
