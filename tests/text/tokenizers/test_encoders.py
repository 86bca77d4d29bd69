"""Tokenizers of encoders, beside transformers: tests/text/make_encoder_fixtures.py makes them and their ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.model_source import ModelSource
from jaxserve.text.pair_forms import encode_pairs
from jaxserve.text.pooled_texts import TextLimits
from jaxserve.text.tokenizers.save import save_tokenizer
from jaxserve.text.tokenizers.sentencepiece_backend import SPACE
from jaxserve.text.tokenizers.sentencepiece_model import read_sentencepiece_model
from jaxserve.text.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.model_source.gguf_files import write_gguf

FIXTURES = Path(__file__).parents[2] / "fixtures" / "text" / "encoders"
CASES: dict[str, Any] = json.loads((FIXTURES / "ids.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
MODULES = [{"type": "sentence_transformers.models.Transformer", "path": ""}]


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource(folder, "folder", "test"))


def bert(folder: Path, **files: Any) -> Tokenizer:
    """Return the tokenizer of the BERT with other small files, by their names without .json."""
    shutil.copytree(FIXTURES / "bert", folder, dirs_exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load(folder)


def gguf(family: str, folder: Path, architecture: str = "bert", **changes: Any) -> ModelSource:
    """Return a family's tokenizer as a GGUF file, as llama.cpp's converter writes it."""
    names: dict[str, Any] = {"add_bos_token": True, "add_eos_token": True}
    if family == "bert":
        vocab = (FIXTURES / "bert" / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
        kinds = [CONTROL if token.startswith("[") and len(token) > 1 else NORMAL for token in vocab]
        tokens = [
            token if kind == CONTROL else token.removeprefix("##") if token.startswith("##") else SPACE + token
            for token, kind in zip(vocab, kinds)
        ]
        ids = {"cls": vocab.index("[CLS]"), "seperator": vocab.index("[SEP]"), "unknown": vocab.index("[UNK]")}
        names |= {"model": "bert"}
    elif family == "xlm_roberta":
        model = read_sentencepiece_model(FIXTURES / family / "sentencepiece.bpe.model", "Unigram")
        pieces = model.pieces[3:]
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece.text for piece in pieces), "<mask>"]
        kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[NORMAL] * len(pieces), CONTROL]
        scores = [0.0] * 4 + [piece.score for piece in pieces] + [0.0]
        ids = {"bos": 0, "eos": 2, "seperator": 2, "unknown": 3, "padding": 1}
        names |= {"model": "t5", "scores": scores, "precompiled_charsmap": list(model.character_map)}
    else:
        vocab = json.loads((FIXTURES / family / "vocab.json").read_text(encoding="utf-8"))
        tokens = sorted(vocab, key=vocab.__getitem__)
        kinds = [CONTROL if token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>") else NORMAL for token in tokens]
        merges = (FIXTURES / family / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
        ids = {"bos": 0, "eos": 2}
        names |= {"model": "gpt2", "pre": "roberta-bpe", "merges": merges}
    names |= {f"{name}_token_id": index for name, index in ids.items()}
    names |= {"tokens": tokens, "token_type": kinds} | changes
    values = {f"tokenizer.ggml.{name}": value for name, value in names.items() if value is not None}
    file = write_gguf(folder / "m.gguf", architecture, values=values)
    return ModelSource(file, "gguf", "test")


def check(tokenizer: Tokenizer, family: str) -> None:
    for case in CASES[family]["texts"]:
        ids = tokenizer.encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids) == case["decoded"]
    pairs = [tuple(case["pair"]) for case in CASES[family]["pairs"]]
    found = encode_pairs(tokenizer, pairs, TextLimits(100), ["a", "b"])
    assert found == [(case["ids"], case["second_start"]) for case in CASES[family]["pairs"]]


@pytest.mark.parametrize("family", CASES)
def test_a_folder_encodes_and_decodes_as_transformers(family: str) -> None:
    check(load(FIXTURES / family), family)


@pytest.mark.parametrize("family", CASES)
def test_a_gguf_file_encodes_and_decodes_as_the_folder(family: str, tmp_path: Path) -> None:
    source = gguf(family, tmp_path)
    check(load_tokenizer(source), family)
    saved = tmp_path / "saved"
    saved.mkdir()
    save_tokenizer(source, saved)
    check(load(saved), family)


@pytest.mark.parametrize(
    ("lowercase", "strips", "same"), [(True, True, "cafe"), (True, False, "café"), (False, False, "CAFÉ")]
)
def test_how_a_gguf_file_normalizes(lowercase: bool, strips: bool, same: str, tmp_path: Path) -> None:
    keys = {"normalizer.lowercase": lowercase, "normalizer.strip_accents": strips}
    backend = load_tokenizer(gguf("bert", tmp_path, **keys))._backend
    assert backend.normalizer.normalize_str("CAFÉ") == same


def test_a_modernbert_frames_texts_as_a_bert_does(tmp_path: Path) -> None:
    names = {"<s>": "[CLS]", "</s>": "[SEP]"}
    vocab = json.loads((FIXTURES / "roberta" / "vocab.json").read_text(encoding="utf-8"))
    tokens = [names.get(token, token) for token in sorted(vocab, key=vocab.__getitem__)]
    keys = {"tokens": tokens, "pre": "modern-bert", "bos_token_id": None, "eos_token_id": None}
    keys |= {"cls_token_id": 0, "seperator_token_id": 2}
    tokenizer = load_tokenizer(gguf("roberta", tmp_path, "modern-bert", **keys))
    assert tokenizer.special_tokens_around(2) == [[0], [2], [2]]
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_a_gguf_file_without_the_tokens_around_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no token '\[CLS\]'"):
        load_tokenizer(gguf("xlm_roberta", tmp_path, bos_token_id=None))


def test_tokenizer_config_says_how_a_bert_normalizes(tmp_path: Path) -> None:
    made = bert(tmp_path)
    (tmp_path / "tokenizer.json").write_text(made.to_json())
    for kind, same in (("BertTokenizerFast", "É"), ("PreTrainedTokenizerFast", "e")):
        cased = bert(tmp_path, tokenizer_config={"tokenizer_class": kind, "do_lower_case": False})
        assert cased._backend.normalizer.normalize_str("É") == same


def test_texts_are_lower_case_where_the_modules_say_so(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"do_lower_case": False}, "sentence_bert_config": {"do_lower_case": True}}
    cased, lower = bert(tmp_path, **files), bert(tmp_path, **files, modules=MODULES)
    assert cased.encode("ENGINE") != cased.encode("engine") == lower.encode("ENGINE")
    assert lower.encode("É") == cased.encode("é") != cased.encode("e"), "accents stay"


def test_types_that_the_model_does_not_get_are_left_out(tmp_path: Path) -> None:
    pairs, names = [("a", "b")], ["document"]
    for inputs, start in (([], 3), (["input_ids"], None), (["input_ids", "token_type_ids"], 3)):
        config = {"do_lower_case": True, **({"model_input_names": inputs} if inputs else {})}
        [pair] = encode_pairs(bert(tmp_path, tokenizer_config=config), pairs, TextLimits(100), names)
        assert pair.second_start == start
