"""Builds a tokenizer from `tekken.json`, the tokenizer file of Mistral's own format.

The file holds byte-level tokens in the order of their merges, a regular expression that splits texts, and, in newer
versions, the special tokens, whose ids come first. The special tokens of files without them are those that
mistral-common gives such files.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import TOKEN_ID, Fields, read_json
from jaxserve.text.tokenizers.sentencepiece_backend import Piece, PieceKind, add_whole_tokens, bpe_backend
from jaxserve.text.tokenizers.token_bytes import byte_alphabet

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""The names of special tokens in chat templates, the same for every file."""

_FIRST_SPECIAL_TOKENS = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_VERSIONS_WITHOUT_SPECIAL_TOKENS = ("v3", "v7")


def backend_from_tekken(path: Path) -> tokenizers.Tokenizer:
    """Return the backend of a tekken.json. Raises `ConfigError` naming what is wrong with the file."""
    fields = Fields(read_json(path), str(path))
    config = Fields(fields.object("config"), f"{path}: config")
    pattern = config.text("pattern", "")
    num_special = config.integer("default_num_special_tokens", TOKEN_ID)
    special = _special_tokens(fields, config, num_special)
    words = _words(fields)
    num_words = config.integer("default_vocab_size", TOKEN_ID) - num_special
    if not 0 < num_words <= len(words):
        raise config.error("default_vocab_size", f"in [{num_special + 1}, {num_special + len(words)}], as tokens are")
    words = words[:num_words]
    alphabet = byte_alphabet()
    texts = ["".join([alphabet[value] for value in word]) for word in words]
    vocab = {piece.text: index for index, piece in enumerate(special)}
    vocab |= {text: num_special + rank for rank, text in enumerate(texts)}
    if len(vocab) != num_special + len(words):
        raise ConfigError(f"{path}: some of its tokens are there twice")
    backend = bpe_backend(str(path), vocab=vocab, merges=_merges(texts), ignore_merges=True)
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the bindings raise bare Exception
        raise ConfigError(f"{path}: config.pattern is no regular expression that can be used: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    add_whole_tokens(backend, special)
    return backend


def _special_tokens(fields: Fields, config: Fields, count: int) -> list[Piece]:
    """Return the special tokens by id: those of the file, then unnamed ones up to `count`."""
    listed = fields.raw.get("special_tokens")
    if listed is None:
        version = config.text("version", "")
        if version not in _VERSIONS_WITHOUT_SPECIAL_TOKENS:
            raise ConfigError(f"{fields.where}: a file of version {version!r} should have special_tokens")
        listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(_FIRST_SPECIAL_TOKENS.split())]
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
        raise fields.error("special_tokens", "a list of objects")
    named: dict[int, Piece] = {}
    for number, entry in enumerate(listed):
        token = Fields(entry, f"{fields.where}: special_tokens[{number}]")
        kind = PieceKind.CONTROL if token.boolean("is_control", True) else PieceKind.USER_DEFINED
        named[token.integer("rank", TOKEN_ID)] = Piece(token.text("token_str", ""), 0.0, kind)
    if len(named) != len(listed) or len(named) > count or max(named, default=-1) >= count:
        raise ConfigError(
            f"{fields.where}: special_tokens should have each rank below default_num_special_tokens ({count}) at most "
            "once"
        )
    return [named.get(rank, Piece(f"<SPECIAL_{rank}>", 0.0, PieceKind.CONTROL)) for rank in range(count)]


def _words(fields: Fields) -> list[bytes]:
    """Return the bytes of the ordinary tokens by rank."""
    entries: Any = fields.raw.get("vocab")
    try:
        words = [base64.b64decode(entry["token_bytes"]) for entry in entries]
        ranks = [entry.get("rank", rank) for rank, entry in enumerate(entries)]
    except (TypeError, KeyError, AttributeError, ValueError, binascii.Error) as error:
        raise ConfigError(f"{fields.where}: vocab should be a list of tokens with token_bytes: {error}") from error
    if not words or ranks != list(range(len(words))):
        raise ConfigError(f"{fields.where}: vocab should list its tokens by rank, from 0 on")
    return words


def _merges(texts: list[str]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary that is in the order of its merges: every split of a token into two others."""
    ranks = {text: rank for rank, text in enumerate(texts)}
    merges: list[tuple[str, str]] = []
    for text in texts:
        cuts = [cut for cut in range(1, len(text)) if text[:cut] in ranks and text[cut:] in ranks]
        cuts.sort(key=lambda cut: ranks[text[:cut]])
        merges += [(text[:cut], text[cut:]) for cut in cuts]
    return merges
