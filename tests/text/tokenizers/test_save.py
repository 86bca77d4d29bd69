from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.model_source import ModelSource
from jaxserve.model_source.generation_config import read_generation_config
from jaxserve.text.tokenizers.save import save_tokenizer
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.model_source.gguf_files import write_gguf
from tests.text.small_tokenizers import SCRIPTS
from tests.text.tokenizers.test_gguf_tokenizer import BYTES, CONTROL, NORMAL, USER_DEFINED, sentencepiece_keys
from tests.tiny_model import write_tiny_model

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:\r\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
TEXTS = [*SCRIPTS, " two  spaces", "hello hello\n\n", "1234567", "IT'S <mark> and <end>.", ""]


def byte_level_keys(pre: str) -> dict[str, Any]:
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), "<end>", "<|im_end|>", "<mark>"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [*[NORMAL] * (len(tokens) - 3), CONTROL, CONTROL, USER_DEFINED],
        "ggml.merges": merges,
        "ggml.bos_token_id": len(tokens) - 3,
        "ggml.eos_token_id": len(tokens) - 3,
    }


def assert_same(left: Tokenizer, right: Tokenizer) -> None:
    for text in TEXTS:
        for added in (False, True):
            ids = left.encode(text, add_special_tokens=added)
            assert ids == right.encode(text, add_special_tokens=added), text
            for skipped in (False, True):
                texts = [one.decode(ids, skip_special_tokens=skipped) for one in (left, right)]
                assert texts[0] == texts[1]
    for name in ("eos_ids", "bos_id", "special_tokens", "chat_templates", "vocab_size", "skipped_ids"):
        assert getattr(left, name) == getattr(right, name), name


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "default"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_byte_level_tokenizer_of_a_gguf(tmp_path: Path, pre: str, template: str | None) -> None:
    _round_trip(tmp_path, byte_level_keys(pre) | ({} if template is None else {"chat_template": template}))


@pytest.mark.parametrize("changes", [{}, {"ggml.add_space_prefix": False}, {"ggml.add_eos_token": True}])
def test_a_sentencepiece_tokenizer_of_a_gguf(tmp_path: Path, changes: dict[str, Any]) -> None:
    _round_trip(tmp_path, sentencepiece_keys() | changes)


def _round_trip(path: Path, keys: dict[str, Any]) -> None:
    file = write_gguf(path / "m.gguf", values={f"tokenizer.{key}": value for key, value in keys.items()})
    folder = path / "saved"
    folder.mkdir()
    source = ModelSource(file, "gguf", "m")
    save_tokenizer(source, folder)
    assert_same(load_tokenizer(source), load_tokenizer(ModelSource(folder, "folder", "m")))


def test_the_sampling_options_of_a_gguf_are_saved(tmp_path: Path) -> None:
    values = {f"tokenizer.{key}": value for key, value in byte_level_keys("gpt-2").items()}
    file = write_gguf(tmp_path / "m.gguf", values=values | {"general.sampling.temp": 0.6})
    source, folder = ModelSource(file, "gguf", "m"), tmp_path / "saved"
    folder.mkdir()
    save_tokenizer(source, folder)

    saved, own = (read_generation_config(one)[0] for one in (ModelSource(folder, "orbax", "m"), source))
    assert saved == own | {"eos_token_id": list(load_tokenizer(source).eos_ids)}
    assert own == {"temperature": 0.6}


def test_a_folders_tokenizer_files_are_copied(tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    model.mkdir()
    target.mkdir()
    write_tiny_model(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    (model / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors"):
        (model / name).write_text("{}")
    source = ModelSource(model, "folder", "m")
    save_tokenizer(source, target)
    names = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in target.iterdir()) == names
    for name in names:
        assert (target / name).read_bytes() == (model / name).read_bytes()
    assert_same(load_tokenizer(source), load_tokenizer(ModelSource(target, "orbax", "m")))


def test_further_chat_templates_of_a_folder_are_copied(tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    target.mkdir()
    (model / "additional_chat_templates").mkdir(parents=True)
    write_tiny_model(model)
    for name in ("rag", "tool_use"):
        (model / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    source = ModelSource(model, "folder", "m")

    save_tokenizer(source, target)

    saved = load_tokenizer(ModelSource(target, "orbax", "m"))
    assert saved.chat_templates == load_tokenizer(source).chat_templates
    assert set(saved.chat_templates) == {"default", "rag", "tool_use"}


def test_the_named_templates_of_a_gguf(tmp_path: Path) -> None:
    named = {"chat_template": TEMPLATE, "chat_templates": ["rag"], "chat_template.rag": "{{ documents }}"}
    _round_trip(tmp_path, byte_level_keys("qwen2") | named)
