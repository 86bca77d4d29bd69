"""Cuts a text file into windows of token ids. A server scores each window alone, as one prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_MIN_SIZE = 2


@dataclasses.dataclass(frozen=True)
class TextWindows:
    """The first windows of a text, all of the same size; `num_text_tokens` counts the whole text."""

    windows: Sequence[Sequence[int]]
    num_text_tokens: int


def read_windows(path: Path, tokenizer: Tokenizer, *, size: int, max_windows: int) -> TextWindows:
    """Read a text and cut its tokens into up to `max_windows` windows of `size` ids.

    Every window begins with the tokenizer's BOS, if it puts one before a text. Tokens after the last whole window are
    left out. Raises `ConfigError` if the file can't be read or the text has no whole window.
    """
    if size < _MIN_SIZE:
        raise ConfigError(f"--window must be at least {_MIN_SIZE} tokens, got {size}: a first token has no probability")
    if max_windows < 1:
        raise ConfigError(f"--max-windows must be at least 1, got {max_windows}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} can't be read: {error}") from None
    ids = tokenizer.encode(text, add_special_tokens=False)
    before = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    step = size - len(before)
    if len(ids) < step:
        raise ConfigError(
            f"--text {path} has {len(ids)} tokens, fewer than one window of {size}: give a longer text or a smaller "
            "--window"
        )
    starts = range(0, len(ids) - step + 1, step)[:max_windows]
    return TextWindows([[*before, *ids[start : start + step]] for start in starts], len(ids))
