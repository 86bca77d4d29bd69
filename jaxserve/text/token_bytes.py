"""The bytes that each token stands for, so that text can be put together token by token.

Two families of decoders cover the models of the field: byte-level BPE, whose tokens are bytes in GPT-2's printable
alphabet, and SentencePiece with byte fallback, whose tokens are text with U+2581 for a space or single bytes `<0xAB>`.
In both, a text is the bytes of its tokens one after another, read as UTF-8. Other decoders have no table.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_SPACE = "▁"


class PieceTable:
    """Bytes by token id, looked up once each. `strips_leading_space`: the start of a text loses one space."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, strips_leading_space: bool) -> None:
        self._backend = backend
        self.byte_level = byte_level
        self._pieces: dict[int, bytes] = {}
        self.strips_leading_space = strips_leading_space

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            # A token outside the alphabet is an added one and stands for itself
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return str(token).replace(_SPACE, " ").encode()


def piece_table(backend: tokenizers.Tokenizer) -> PieceTable | None:
    """The table of this tokenizer, or None if its decoder is of neither family."""
    if backend.decoder is None:
        return None
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(backend, byte_level=True, strips_leading_space=False)
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    if steps[0]["pattern"] != {"String": _SPACE} or steps[0]["content"] != " ":
        return None
    if kinds[-1] == "Strip" and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
        return None
    return PieceTable(backend, byte_level=False, strips_leading_space=kinds[-1] == "Strip")


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte: printable Latin-1 stands for itself, the rest follows from U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {value: chr(value) for value in own} | {value: chr(256 + rank) for rank, value in enumerate(others)}


_BYTE_OF_CHAR = {char: value for value, char in byte_alphabet().items()}
