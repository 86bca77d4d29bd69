"""A byte-level tokenizer: id = byte for ASCII and all others, then the special tokens. Small, but the real classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.text.chat_template import ChatTemplate, Message
from jaxserve.text.token_bytes import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizer_parts import TokenizerParts

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
BOS_ID, START_ID, END_ID = 256, 257, 258
VOCAB_SIZE = 259

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if mood %}[{{ mood if mood is string else mood | tojson(indent=1) }}]{% endif %}"
    "{% if documents %}{{ documents | length }} documents\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """The tokenizer; it adds no BOS, and ends a generation at `<|im_end|>`."""
    vocab = {char: value for value, char in byte_alphabet().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(TokenizerParts(backend, (END_ID,), BOS_ID, {"bos_token": "<s>"}, template))


class TinyTemplate:
    """The chat template of the tokenizer, rendered in the test's own process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        return self._template.render(messages, **arguments)

    async def close(self) -> None:
        pass
