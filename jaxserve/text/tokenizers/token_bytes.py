"""The bytes of each token, so that a text can be decoded token by token.

Two families of decoders cover nearly all models: byte-level BPE, whose tokens are bytes in GPT-2's printable alphabet,
and SentencePiece with byte fallback, whose tokens are text with U+2581 for a space, or single bytes `<0xAB>`. In both,
a text is the concatenated bytes of its tokens, read as UTF-8. Other decoders have no table.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_SPACE = "▁"


class TokenByteTable:
    """The bytes of each token id, cached. With `strips_leading_space`, decoding drops one space at a text's start."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, strips_leading_space: bool) -> None:
        self._backend = backend
        self.byte_level = byte_level
        self._bytes_by_id: dict[int, bytes] = {}
        self.strips_leading_space = strips_leading_space

    def __getitem__(self, token_id: int) -> bytes:
        value = self._bytes_by_id.get(token_id)
        if value is None:
            value = self._bytes_by_id[token_id] = self._look_up(token_id)
        return value

    def spellings(self, data: bytes) -> list[str]:
        """Return how the vocabulary may spell a token with these bytes."""
        if self.byte_level:
            return ["".join(_CHAR_OF_BYTE[value] for value in data)]
        one_byte = [f"<0x{data[0]:02X}>"] if len(data) == 1 else []
        return [data.decode(errors="replace").replace(" ", _SPACE), *one_byte]

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            # A token outside the alphabet is an added token, which stands for itself
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return str(token).replace(_SPACE, " ").encode()


def token_byte_table(backend: tokenizers.Tokenizer) -> TokenByteTable | None:
    """Return the table of this tokenizer, or None if its decoder belongs to neither family."""
    steps = component_steps(backend.decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenByteTable(backend, byte_level=True, strips_leading_space=False)
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return None
    if steps[0]["pattern"] != {"String": _SPACE} or steps[0]["content"] != " ":
        return None
    if kinds[-1] == "Strip" and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
        return None
    return TokenByteTable(backend, byte_level=False, strips_leading_space=kinds[-1] == "Strip")


def component_steps(component: Any) -> list[dict[str, Any]]:
    """Return the configurations of a backend's decoder, normalizer or pre-tokenizer, with sequences flattened."""
    return [] if component is None else _flatten(json.loads(component.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    parts = step.get("decoders") or step.get("normalizers") or step.get("pretokenizers") or []
    return [inner for part in parts for inner in _flatten(part)]


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's printable character of each byte: itself if it is printable Latin-1, else one from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {value: chr(value) for value in own} | {value: chr(256 + rank) for rank, value in enumerate(others)}


_CHAR_OF_BYTE = byte_alphabet()
_BYTE_OF_CHAR = {char: value for value, char in _CHAR_OF_BYTE.items()}
