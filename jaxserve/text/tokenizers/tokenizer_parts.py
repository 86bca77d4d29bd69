"""The parts of a tokenizer, in one form for all file formats."""

from __future__ import annotations

import dataclasses

import tokenizers

HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""The ends of gpt-oss, which tell it apart. Messages within a turn end with <|end|>, the last one with one of these."""


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """A `tokenizers` backend and the facts that it doesn't hold: `eos_ids` end a generation, `special_tokens` are the
    template variables for tokens (`{"bos_token": "<s>"}`), `chat_templates` are Jinja sources by name, most often just
    one named "default". Without `has_token_types`, models don't get the types of tokens that it gives to pairs."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    has_token_types: bool = True
