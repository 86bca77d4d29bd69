"""Builds `tokenizers` backends of encoders: WordPiece as BERT has it, Unigram as XLM-RoBERTa has it, and their forms of
one text and of pairs. Reads no files: `hf_folder` and `gguf_tokenizer` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.sentencepiece_backend import SPACE, Piece, add_whole_tokens

XLM_ROBERTA = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The first tokens of XLM-RoBERTa. Those of its SentencePiece model follow, from the fourth on, and the last one."""
XLM_ROBERTA_MASK = "<mask>"


def wordpiece_backend(
    pieces: Sequence[Piece], unknown: str, *, lowercase: bool, strip_accents: bool | None
) -> tokenizers.Tokenizer:
    """Return the backend of a vocabulary in which pieces that continue a word begin with ##; an index is an id."""
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    add_whole_tokens(backend, pieces)
    return backend


def unigram_backend(
    pieces: Sequence[Piece], unknown: int | None, character_map: bytes, where: str
) -> tokenizers.Tokenizer:
    """Return the backend of a Unigram model; a piece's index is its id. Raises `ConfigError`, naming the file `where`,
    if the pieces or the map of characters are damaged."""
    try:
        backend = tokenizers.Tokenizer(models.Unigram([(piece.text, piece.score) for piece in pieces], unknown, False))
        if character_map:
            backend.normalizer = normalizers.Precompiled(character_map)
    except Exception as error:  # the bindings raise bare Exception
        raise ConfigError(f"{where}: its tokenizer is inconsistent: {error}") from error
    spaces: dict[str, Any] = {"replacement": SPACE, "prepend_scheme": "always"}
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**spaces)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.Metaspace(**spaces)
    add_whole_tokens(backend, pieces)
    return backend


def frame_texts(backend: tokenizers.Tokenizer, first: str, last: str, *, has_token_types: bool) -> None:
    """Let special tokens stand around a text and around both of a pair.

    As with BERT, tokens of the second text have type 1 if there are types. Else, as with RoBERTa, the last token stands
    twice between both.
    """
    between, second = ([], 1) if has_token_types else ([last], 0)
    backend.post_processor = TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, *between, f"$B:{second}", f"{last}:{second}"],
        special_tokens=[(text, backend.token_to_id(text)) for text in dict.fromkeys((first, last))],
    )
