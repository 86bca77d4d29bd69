"""What a tokenizer is made of, whichever files it came from."""

from __future__ import annotations

import dataclasses

import tokenizers


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """`backend` does the work; `eos_ids` end a generation; `special_tokens` are the names and texts templates know
    (`{"bos_token": "<s>"}`); `chat_template` is Jinja source."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None
    special_tokens: dict[str, str]
    chat_template: str | None
