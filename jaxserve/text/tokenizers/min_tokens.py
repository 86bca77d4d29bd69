"""A lower bound of a text's number of tokens from its length alone, so that a text too long for the context need not be
tokenized.

Only byte-level BPE and BPE with byte fallback have such a bound: their tokens hold all bytes of a text. Other
tokenizers may drop parts of a text, or encode a stretch of any length as one unknown token.
"""

from __future__ import annotations

import math
from typing import Any

import tokenizers

from jaxserve.text.tokenizers.token_bytes import byte_alphabet, component_steps

# The factor by which a normalizer can shorten a text in UTF-8: NFC turns the three bytes of U+212A into K, NFKC the
# four of U+1D400 into A, and no sequence shrinks more. Any other step may drop text.
_SHRINK_FACTORS = {"NFC": 3.0, "NFD": 3.0, "NFKC": 4.0, "NFKD": 4.0, "Lowercase": 3.0, "Prepend": 1.0, "ByteLevel": 1.0}
_IN_UTF8 = {*range(0xC0), *range(0xC2, 0xF5)}
_KEEPS_BYTES = {"Prepend", "ByteLevel"}
_KEEPS_TEXT = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"}


class MinTokenCounter:
    """Computes the lower bound for one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._longest, self._dropped = _most_bytes_per_token(backend)
        added = backend.get_added_tokens_decoder().values()
        # Such a token absorbs any amount of adjacent white space.
        self._strips = any(token.lstrip or token.rstrip for token in added)

    def min_num_tokens(self, text: str) -> int:
        """Return the smallest number of tokens that `text` can have; 0 if there is no bound."""
        if not self._longest:
            return 0
        counted = "".join(text.split()) if self._strips else text
        written = counted.encode(errors="surrogatepass").translate(None, self._dropped)
        return math.ceil(len(written) / self._longest)


def _most_bytes_per_token(backend: tokenizers.Tokenizer) -> tuple[float, bytes]:
    """Return the most bytes of a text that one token can hold (0 if there is no limit), and the bytes that are dropped
    because the vocabulary has no token for them."""
    model, unbounded = backend.model, (0.0, b"")
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return unbounded
    normalizing, splitting = component_steps(backend.normalizer), component_steps(backend.pre_tokenizer)
    vocab = backend.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in normalizing + splitting):
        dropped = bytes(value for value, char in byte_alphabet().items() if char not in vocab)
        longest = max(map(len, vocab), default=0)  # each character of a token is one byte
        known = model.unk_token is None or not set(dropped) & _IN_UTF8
    else:
        dropped = b""
        longest = max((len(token.encode()) for token in vocab), default=0)
        known = model.byte_fallback and all(f"<0x{value:02X}>" in vocab for value in range(256))
    if set(dropped) & _IN_UTF8 and not all(step["type"] in _KEEPS_BYTES for step in normalizing):
        known = False  # a dropped byte may come from the normalizer instead of the text
    if not known or any(step["type"] not in _KEEPS_TEXT or step.get("behavior") == "Removed" for step in splitting):
        return unbounded
    for token in backend.get_added_tokens_decoder().values():
        normalized = backend.normalizer.normalize_str(token.content) if backend.normalizer else token.content
        longest = max(longest, len(token.content.encode()), len(normalized.encode()))
    return longest * math.prod(map(_shrink, normalizing)), dropped


def _shrink(step: dict[str, Any]) -> float:
    """Return the factor by which a step can shorten a text, or 0 if it may drop text."""
    if step["type"] == "Replace":
        old, new = step["pattern"].get("String"), step["content"]
        return max(1.0, len(old.encode()) / len(new.encode())) if old and new else 0.0
    return _SHRINK_FACTORS.get(step["type"], 0.0)
