"""Makes the small tokenizers of tests/fixtures/text/encoders, and the ids that transformers encodes texts to.

Run in an environment that has sentencepiece, protobuf and the transformers that pyproject.toml admits:
`python -m tests.text.make_encoder_fixtures`.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "fixtures" / "text" / "encoders"
CORPUS = [
    *(ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines(),
    *["Straße, café, naïve résumé; 你好，世界！ Привет, мир. नमस्ते दुनिया"] * 2,
]
TEXTS = [
    "",
    "a",
    "Hello World, it's 2024!",
    "Café naïve RÉSUMÉ ﬁne ①",
    "你好，世界！ Привет, мир नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 emoji",
    "tab\tnew\nline\r\n\x00\x01\x7f\u200b\ufeffzero\u2028",
    "  two  spaces   and trailing  ",
    "x" * 150,
    "don't e-mail me@example.com",
    "a [SEP] b </s> c",
]
PAIRS = [("a", "b"), ("the engine's step", "Café 你好")]
RULES = "FB01\t66 69\n2460\t31\n9\t20\nA\t20\n"  # a ligature, a digit in a circle, the tab and the newline


def write(family: str, **configs: dict[str, Any]) -> Path:
    folder = FOLDER / family
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    return folder


def make_bert() -> None:
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(CORPUS, vocab_size=500, show_progress=False)
    folder = write("bert", config={"model_type": "bert"}, tokenizer_config={"do_lower_case": True})
    trained.save_model(str(folder))


def make_roberta() -> None:
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(CORPUS, vocab_size=500, special_tokens=special, show_progress=False)
    trained.save_model(str(write("roberta", config={"model_type": "roberta"})))


def make_xlm_roberta() -> None:
    file, rules = io.BytesIO(), Path(tempfile.mkdtemp()) / "rules.tsv"
    rules.write_text(RULES, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=file,
        model_type="unigram",
        vocab_size=400,
        character_coverage=0.999,
        normalization_rule_tsv=str(rules),
        minloglevel=2,
    )
    folder = write("xlm_roberta", config={"model_type": "xlm-roberta"})
    (folder / "sentencepiece.bpe.model").write_bytes(file.getvalue())


def reference(family: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / family)
    pairs = []
    for pair in PAIRS:
        encoded = tokenizer(*pair)
        types = encoded.get("token_type_ids", [0])
        pairs.append(
            {"pair": pair, "ids": encoded["input_ids"], "second_start": types.index(1) if 1 in types else None}
        )
    encoded = [tokenizer(text)["input_ids"] for text in TEXTS]
    return {
        "texts": [
            {"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)}
            for text, ids in zip(TEXTS, encoded)
        ],
        "pairs": pairs,
    }


if __name__ == "__main__":
    make_bert()
    make_roberta()
    make_xlm_roberta()
    cases = {family: reference(family) for family in ("bert", "roberta", "xlm_roberta")}
    (FOLDER / "ids.json").write_text(json.dumps(cases, ensure_ascii=True) + "\n", encoding="utf-8")
