"""Makes the small tokenizers of tests/fixtures/text, and the ids that their reference libraries encode texts to.

Run in an environment that has sentencepiece, mistral-common and tokenizers: `python tests/text/make_fixtures.py`. The
project itself needs the first two nowhere.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent.parent / "fixtures" / "text"
CORPUS = [
    *(Path(__file__).parent.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines(),
    "Straße, café, naïve résumé; 你好，世界！ Привет, мир. नमस्ते दुनिया",
    "<table><tr>1234567</tr></table>",
] * 2
TEXTS = [
    "Hello world",
    "The engine's step reads 1234567 pages, doesn't it?",
    "  two  spaces   and trailing  ",
    " lead",
    "a\n\n\nb\tc\r\n",
    "def f(x):\n    return  x**2",
    "你好，世界！ Привет, мир",
    "नमस्ते 👩‍👩‍👧‍👦 ﬁne ①",
    "<table><tr>x</tr></table>",
    "",
]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"control_symbols": ["[INST]", "[/INST]"]},
    "gemma": {
        "add_dummy_prefix": False,
        "control_symbols": ["<start_of_turn>", "<end_of_turn>"],
        "user_defined_symbols": ["▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n", "<table>", "</table>"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "bos_piece": "<bos>",
        "eos_piece": "<eos>",
    },
    "normalizing": {"remove_extra_whitespaces": True},
}
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = "FB01\t66 69\n2460\t31\n9\t20\n"  # a ligature, a digit in a circle and the tab
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[THINK]"]


def make_sentencepiece() -> dict[str, Any]:
    cases = {}
    rules = Path(tempfile.mkdtemp()) / "rules.tsv"
    rules.write_text(RULES, encoding="utf-8")
    for name, options in MODELS.items():
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=file,
            **{
                "model_type": "bpe",
                "vocab_size": 600,
                "byte_fallback": True,
                "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False,
                "split_digits": True,
                "character_coverage": 0.99,
                "minloglevel": 2,
                **options,
                **({"normalization_rule_tsv": str(rules)} if name == "normalizing" else {}),
            },
        )
        (FOLDER / f"sentencepiece_{name}.model").write_bytes(file.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
        ids = [processor.encode(text) for text in TEXTS]
        cases[name] = [{"text": text, "ids": each, "decoded": processor.decode(each)} for text, each in zip(TEXTS, ids)]
    return cases


def make_tekken() -> list[dict[str, Any]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    byte_of = {chr(value): value for value in own} | {chr(256 + rank): value for rank, value in enumerate(others)}
    merged = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda pair: pair[1]) if len(token) > 1]
    words = [bytes([value]) for value in range(256)] + [bytes(byte_of[char] for char in token) for token in merged]
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + 20,
            "default_num_special_tokens": 30,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)],
    }
    path = FOLDER / "tekken.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    tekken = Tekkenizer.from_file(path)
    return [{"text": text, "ids": tekken.encode(text, bos=True, eos=False)} for text in TEXTS]


if __name__ == "__main__":
    content = {"sentencepiece": make_sentencepiece(), "tekken": make_tekken()}
    text = json.dumps(content, ensure_ascii=False, indent=None)
    (FOLDER / "reference_ids.json").write_text(text + "\n", encoding="utf-8")
