"""A small real tokenizer: byte-level BPE with about a hundred words after a space, and a BOS in front."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts

SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe")


def backend() -> tokenizers.Tokenizer:
    """Train a tokenizer on all words of two syllables."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = [first + second for first in SYLLABLES for second in SYLLABLES]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<bos>"],
        show_progress=False,
    )
    made.train_from_iterator([" " + " ".join(words)] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return made


def word_tokenizer() -> Tokenizer:
    """Return it as a `Tokenizer`."""
    return Tokenizer(TokenizerParts(backend=backend(), eos_ids=(), bos_id=0, special_tokens={}, chat_templates={}))


def write_folder(folder: Path) -> str:
    """Write a folder that holds only the tokenizer, and return its path."""
    backend().save(str(folder / "tokenizer.json"))
    return str(folder)
