"""A small byte-level tokenizer of the real classes: an id is its byte, followed by the special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.text.answers.formats import DEFAULT_CALLS
from jaxserve.text.chat_template import ChatTemplate, ContentFormat, Message
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from tests.tiny_model import byte_tokenizer

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
    """Return the tokenizer. It adds no BOS; `<|im_end|>` ends a generation."""
    templates = {} if template is None else {"default": template}
    return Tokenizer(TokenizerParts(byte_tokenizer(*SPECIAL), (END_ID,), BOS_ID, {"bos_token": "<s>"}, templates))


class TinyTemplate:
    """Renders the tokenizer's chat template in the test's process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        calls: str = DEFAULT_CALLS.name,
        content_format: ContentFormat = "auto",
        source: str | None = None,
    ) -> None:
        self._tokenizer, self._calls, self._content_format = tokenizer, calls, content_format
        self._template = ChatTemplate(
            source or tokenizer.chat_template, tokenizer.special_tokens, calls, content_format
        )

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        return self._template.render(messages, **arguments)

    async def turn_end(self) -> str:
        return self._template.turn_end()

    def with_source(self, source: str) -> TinyTemplate:
        return TinyTemplate(self._tokenizer, self._calls, self._content_format, source)

    async def close(self) -> None:
        pass
