from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.model_files import model_files
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import read_served_checkpoint
from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.served_tokenizer import load_served_tokenizer
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.model_source.gguf_files import write_gguf
from tests.text.tokenizers.test_save import byte_level_keys
from tests.tiny_model import EOS_ID, VOCAB_SIZE, byte_tokenizer, write_tiny_model

_IM_END = byte_level_keys("gpt-2")["ggml.tokens"].index("<|im_end|>")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return write_tiny_model(folder)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder that has a tokenizer only: `<b>` and `</b>` are where `<s>` and `</s>` are in the model's own."""
    folder = tmp_path / "other"
    folder.mkdir()
    byte_tokenizer("<b>", "</b>").save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<b>", "eos_token": "<b>", "chat_template": "other"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def load(model: Path, **settings: Any) -> Tokenizer:
    return load_served_tokenizer(EngineConfig(model=str(model), **settings))


def test_the_models_own(model: Path) -> None:
    tokenizer = load(model)

    assert tokenizer.encode("a<s>") == [97, 256]
    assert tokenizer.eos_ids == (EOS_ID,)


def test_another_one_brings_its_tokens_and_template(model: Path, other: Path) -> None:
    tokenizer = load(model, tokenizer_path=str(other))

    assert tokenizer.encode("a<b>") == [97, 256]
    assert tokenizer.chat_template == "other"
    assert tokenizer.special_tokens["bos_token"] == "<b>"
    assert tokenizer.eos_ids == (EOS_ID, 256)  # the model's own too


def test_the_models_generation_config_says_what_ends_an_answer(model: Path, other: Path) -> None:
    for folder, end in ((model, 5), (other, 6)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))

    assert load(model, tokenizer_path=str(other)).eos_ids == (5, EOS_ID, 256)


def test_a_tokenizer_with_ids_beyond_the_model_is_refused(model: Path, other: Path) -> None:
    byte_tokenizer("<b>", "</b>", "<pad>").save(str(other / "tokenizer.json"))

    with pytest.raises(ConfigError, match=f"tokenizer_path={other} makes ids up to 258, and .* {model} ends at 257"):
        load(model, tokenizer_path=str(other))
    config = {"text_config": {"vocab_size": VOCAB_SIZE + 1}, "vocab_size": 5}
    assert load(model, tokenizer_path=str(other), hf_overrides=config).largest_id == 258


def test_a_folder_without_a_tokenizer_is_named(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=str(empty)):
        load(model, tokenizer_path=str(empty))
    with pytest.raises(ConfigError, match="tokenizer_path=/nowhere: "):
        load(model, tokenizer_path="/nowhere")


def gguf(path: Path, **keys: Any) -> Path:
    keys = {f"tokenizer.{key}": value for key, value in (byte_level_keys("gpt-2") | keys).items()}
    return write_gguf(path / "m.gguf", values=keys)


def test_a_gguf_file_with_a_tokenizer_that_is_not_known(other: Path, tmp_path: Path) -> None:
    file = gguf(tmp_path, **{"ggml.pre": "unheard-of", "ggml.eos_token_id": 3})
    size = {"vocab_size": 300}
    with pytest.raises(ConfigError, match="pre-tokenizer 'unheard-of' is not supported"):
        load(file, hf_overrides=size)

    tokenizer = load(file, tokenizer_path=str(other), hf_overrides=size)
    assert tokenizer.encode("a<b>") == [97, 256]
    assert tokenizer.eos_ids == (3, _IM_END, 256)


def test_the_tokenizer_of_a_gguf_file(model: Path, tmp_path: Path) -> None:
    path = str(gguf(tmp_path, **{"ggml.eos_token_id": 3}))
    tokenizer = load(model, tokenizer_path=path, hf_overrides={"vocab_size": 300})

    assert tokenizer.eos_ids == (EOS_ID, 3, _IM_END)


def test_tokens_of_labels_have_the_ids_of_the_tokenizer(model: Path, other: Path) -> None:
    labels = {"classifier_from_token": ["</b>"]}
    config = EngineConfig(model=str(model), tokenizer_path=str(other), hf_overrides=labels)
    pooled = read_served_checkpoint(config, model_files(config)).task.pooled

    assert pooled is not None
    assert pooled.pooling.layers[0].tokens == (257,)
    own = EngineConfig(model=str(model), hf_overrides=labels)
    with pytest.raises(ConfigError, match="</b>"):
        read_served_checkpoint(own, model_files(own))


def test_texts_are_made_lower_case_as_the_model_says(model: Path, other: Path) -> None:
    (model / "modules.json").write_text("[]")
    (model / "sentence_bert_config.json").write_text('{"do_lower_case": true}')

    assert load(model, tokenizer_path=str(other)).encode("A") == [97]
