"""Small real tokenizers, one for each kind of decoder."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxserve.text.tokenizers.token_bytes import byte_alphabet
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts

SCRIPTS = [
    "Hello world, it's 2024!",
    "你好，世界！",
    "こんにちは世界",
    "안녕하세요 세계",
    "Привет, мир",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "def f(x):\n\treturn  x**2\r\n",
]
SPECIAL = ["<bos>", "<eos>"]


def byte_level() -> Tokenizer:
    """Return a byte-level BPE like GPT-2's; some of its tokens are parts of characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(byte_alphabet().values())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(SCRIPTS, trainer)
    # Two added tokens: one within the byte alphabet, one outside
    backend.add_tokens([AddedToken("é!", normalized=False), AddedToken("日本", normalized=False)])
    return make(backend)


def sentencepiece() -> Tokenizer:
    """Return a BPE with byte fallback like Llama 2's: unknown characters become single bytes."""
    known = [
        *SPECIAL,
        "<unk>",
        *(f"<0x{value:02X}>" for value in range(256)),
        "▁",
        *"Helowrd,it's2024!世界мир",
        "▁▁",
        "▁w",
        "el",
    ]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(known))}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "▁"), ("▁", "w"), ("e", "l")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return make(backend)


def words() -> Tokenizer:
    """Return a tokenizer of whole words without a decoder: decoding joins them with spaces."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, "<unk>", "hello", "world", "it", "is", "世界"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return make(backend)


def make(backend: tokenizers.Tokenizer, chat_template: str | None = None) -> Tokenizer:
    """Return a `Tokenizer` with the backend's usual BOS and EOS."""
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            eos_ids=(backend.token_to_id("<eos>"),),
            bos_id=backend.token_to_id("<bos>"),
            special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
            chat_templates={} if chat_template is None else {"default": chat_template},
        )
    )
