"""Reads `tokenizer.model`, the file of a SentencePiece model, for folders without a tokenizer.json, and XLM-RoBERTa's
`sentencepiece.bpe.model`, which in spite of its name is a Unigram model.

The file is a protobuf message; its few fields that matter are read here without SentencePiece or protobuf. Field
numbers and defaults are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, normalizers

from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import TOKEN_ID, Fields
from jaxserve.text.tokenizers.encoder_backends import XLM_ROBERTA, XLM_ROBERTA_MASK, frame_texts, unigram_backend
from jaxserve.text.tokenizers.sentencepiece_backend import SPACE, Piece, PieceKind, sentencepiece_backend

_MODEL_TYPES = {1: "Unigram", 2: "BPE", 3: "Word", 4: "Char"}
_REMEDY = "Add the model's tokenizer.json to the folder"


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a `tokenizer.model` that encoding needs. `special_tokens` are template variables, by their names
    (`bos_token`)."""

    pieces: list[Piece]
    special_tokens: dict[str, str]
    adds_space_prefix: bool
    removes_extra_spaces: bool
    character_map: bytes


def read_sentencepiece_model(path: Path, model_type: Literal["BPE", "Unigram"] = "BPE") -> SentencePieceModel:
    """Read a file. Raises `ConfigError` if it is no SentencePiece model, or one of another type."""
    try:
        return _parse(path.read_bytes(), path, model_type)
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise ConfigError(
            f"{path} can't be read as a SentencePiece model ({error}); files of the same name in tiktoken's format are "
            f"not supported. {_REMEDY}"
        ) from error


def backend_from_sentencepiece(
    model: SentencePieceModel, config: Mapping[str, Any], where: str
) -> tokenizers.Tokenizer:
    """Return the backend of a model with the settings of its tokenizer_config.json, `where` names it in errors.

    `added_tokens_decoder` renames pieces or adds tokens after them. `legacy` false puts the space before a text only at
    its start, as transformers does; by default there is one after every whole token too.
    """
    pieces = [
        piece._replace(text=piece.text.replace(SPACE, " ")) if piece.kind == PieceKind.USER_DEFINED else piece
        for piece in model.pieces
    ]
    _add_declared_tokens(pieces, Fields(config, where))
    normalizing = _character_map(model, where)
    if model.removes_extra_spaces:
        outer = normalizers.Replace(Regex(r"\A +| +\z"), "")
        normalizing += [outer, normalizers.Replace(Regex(" {2,}"), " ")]
    space_prefix: Literal["always", "first", "never"] = "first" if config.get("legacy") is False else "always"
    if not Fields(config, where).boolean("add_prefix_space", model.adds_space_prefix):
        space_prefix = "never"
    return sentencepiece_backend(pieces, space_prefix=space_prefix, normalizing=normalizing, where=where)


def backend_from_xlm_roberta(model: SentencePieceModel, where: str) -> tokenizers.Tokenizer:
    """Return the backend of XLM-RoBERTa: its ids are not those of the model, of whose pieces the first three are others
    and no part of a text. Raises `ConfigError`."""
    first = [
        Piece(text, 0.0, PieceKind.UNKNOWN if name == "unk_token" else PieceKind.CONTROL)
        for name, text in XLM_ROBERTA.items()
    ]
    pieces = [*first, *model.pieces[3:], Piece(XLM_ROBERTA_MASK, 0.0, PieceKind.CONTROL, lstrip=True)]
    backend = unigram_backend(pieces, len(first) - 1, model.character_map, where)
    frame_texts(backend, XLM_ROBERTA["bos_token"], XLM_ROBERTA["eos_token"], has_token_types=False)
    return backend


def _character_map(model: SentencePieceModel, where: str) -> list[Any]:
    try:
        return [normalizers.Precompiled(model.character_map)] if model.character_map else []
    except Exception as error:  # the bindings raise bare Exception
        raise ConfigError(
            f"{where}: the tokenizer.model beside it has a damaged map of characters ({error}); fetch the file again"
        ) from error


def _add_declared_tokens(pieces: list[Piece], config: Fields) -> None:
    """Put the tokens of `added_tokens_decoder` in place of the pieces with their ids, or after all pieces."""
    declared = Fields(config.object("added_tokens_decoder"), f"{config.where}: added_tokens_decoder")
    ids = Fields({name: int(name) if name.isdecimal() else name for name in declared.raw}, declared.where)
    for token_id, name in sorted((ids.integer(name, TOKEN_ID), name) for name in ids.raw):
        token = Fields(declared.object(name), f"{declared.where}.{name}")
        text = token.text("content", "")
        if not text or token_id > len(pieces):
            raise ConfigError(
                f"{declared.where} names {text!r} as token {token_id}, but the last token before it is "
                f"{len(pieces) - 1}. {_REMEDY}"
            )
        kind = PieceKind.CONTROL if token.boolean("special", False) else PieceKind.USER_DEFINED
        new = Piece(text, 0.0, kind, token.boolean("lstrip", False), token.boolean("rstrip", False))
        if token_id < len(pieces):
            old = pieces[token_id]
            same = old.text == text.replace(SPACE, " ")
            kind = PieceKind.UNKNOWN if old.kind == PieceKind.UNKNOWN else kind
            new = new._replace(text=old.text if same else text, kind=kind)
        pieces[token_id : token_id + 1] = [new]


def _parse(data: bytes, path: Path, wanted: str) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(value))
            [score] = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append(Piece(piece[1].decode(), score, piece.get(3, PieceKind.NORMAL)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    model_type = _MODEL_TYPES.get(trainer.get(3, 1), trainer.get(3))
    if model_type != wanted:
        raise ConfigError(
            f"{path} is a SentencePiece model of type {model_type}, only {wanted} is supported. {_REMEDY}"
        )
    ids = {"unk_token": trainer.get(40, 0), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
    ids["pad_token"] = trainer.get(43, -1)
    return SentencePieceModel(
        pieces=pieces,
        special_tokens={name: pieces[index].text for name, index in ids.items() if 0 <= index < len(pieces)},
        adds_space_prefix=bool(normalizer.get(3, True)),
        removes_extra_spaces=bool(normalizer.get(4, True)),
        character_map=bytes(normalizer.get(2, b"")),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protobuf message: an int, or the bytes of a number or message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of wire type {kind}")
        length, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + length > len(data):
            raise ValueError("the file is cut off")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")
