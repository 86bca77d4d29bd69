"""The least number of tokens that a text can have, by its length alone: a text too long for any context needs no
counting.

Known of tokenizers that write the bytes of a text as parts of tokens: BPE over bytes, and BPE that falls back to them.
Others drop parts of a text, or write a stretch of any length as one unknown token: they have no such number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import tokenizers

from jaxserve.text.token_bytes import byte_alphabet

# By how much a normalizer can shorten a text in UTF-8: NFC writes the three bytes of U+212A as K, NFKC the four of
# U+1D400 as A, and no sequence loses more. A step that isn't here may drop text.
_SHRINKS = {"NFC": 3.0, "NFD": 3.0, "NFKC": 4.0, "NFKD": 4.0, "Lowercase": 3.0, "Prepend": 1.0, "ByteLevel": 1.0}
_IN_UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}
_SAME = {"Prepend", "ByteLevel"}
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"}


class TextLengths:
    """What the length of a text says of one tokenizer's tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._longest, self._dropped = _most_bytes_per_token(backend)
        added = backend.get_added_tokens_decoder().values()
        # Such a token takes the white space beside it, however much that is.
        self._strips = any(token.lstrip or token.rstrip for token in added)

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that `text` can have; 0 if there is no bound."""
        if not self._longest:
            return 0
        counted = "".join(text.split()) if self._strips else text
        written = counted.encode(errors="surrogatepass").translate(None, self._dropped)
        return math.ceil(len(written) / self._longest)


def _most_bytes_per_token(backend: tokenizers.Tokenizer) -> tuple[float, bytes]:
    """The most bytes of a text that one token stands for, 0 where nothing bounds them; and the bytes that are dropped,
    as the vocabulary has no token for them."""
    model, unbounded = backend.model, (0.0, b"")
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return unbounded
    normalizing, splitting = list(_steps(backend.normalizer)), list(_steps(backend.pre_tokenizer))
    vocab = backend.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in normalizing + splitting):
        dropped = bytes(value for value, char in byte_alphabet().items() if char not in vocab)
        longest = max(map(len, vocab), default=0)  # a character is a byte
        known = model.unk_token is None or not set(dropped) & _IN_UTF8
    else:
        dropped = b""
        longest = max((len(token.encode()) for token in vocab), default=0)
        known = model.byte_fallback and all(f"<0x{value:02X}>" in vocab for value in range(256))
    if set(dropped) & _IN_UTF8 and not all(step["type"] in _SAME for step in normalizing):
        known = False  # what is dropped is no byte of the text itself
    if not known or any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in splitting):
        return unbounded
    for token in backend.get_added_tokens_decoder().values():
        normalized = backend.normalizer.normalize_str(token.content) if backend.normalizer else token.content
        longest = max(longest, len(token.content.encode()), len(normalized.encode()))
    return longest * math.prod(map(_shrink, normalizing)), dropped


def _shrink(step: dict[str, Any]) -> float:
    """How much shorter a text may get, 0 where it may be dropped."""
    if step["type"] == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        return max(1.0, len(old.encode()) / len(new.encode())) if old and new else 0.0
    return _SHRINKS.get(step["type"], 0.0)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The normalizers or pre-tokenizers that one is made of."""
    if part is not None:
        yield from _flatten(json.loads(part.__getstate__()))


def _flatten(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step.get("normalizers", step.get("pretokenizers", [])):
        yield from _flatten(inner)
