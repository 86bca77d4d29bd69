"""The lengths of a dataset's requests in tokens, and whether they fit a server's context."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from jaxserve.bench.datasets.prompts import BenchConversation, Content
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError


def request_lengths(conversation: BenchConversation, vocabulary: Vocabulary) -> Sequence[int | None]:
    """Return the tokens of the dataset in each request of a conversation: earlier turns count, but not the answers.

    None is an unknown length: there is no tokenizer to count a text.
    """
    known = [prompt.prompt_tokens for prompt in conversation.prompts]
    if None not in known or not vocabulary.can_count:
        return known
    texts = [[conversation.system or ""], *(list(_texts(prompt.content)) for prompt in conversation.prompts)]
    tokens = [sum(map(vocabulary.count_answer, of_turn)) for of_turn in texts]
    return [vocabulary.added + total for total in itertools.accumulate(tokens)][1:]


def check_context(
    conversations: Sequence[BenchConversation], lengths: Sequence[Sequence[int | None]], limit: int, *, chat: bool
) -> None:
    """Raise `ConfigError` if a request can't fit a context of `limit` tokens. `lengths` are by conversation.

    Tokens that aren't known before the run, such as those of earlier answers and of the chat template, don't count.
    """
    pairs = [
        (tokens or 1, prompt.output_tokens)
        for conversation, of_turns in zip(conversations, lengths, strict=True)
        for prompt, tokens in zip(conversation.prompts, of_turns, strict=True)
    ]
    too_long = [pair for pair in pairs if sum(pair) > limit]
    if too_long:
        tokens, output = max(too_long, key=sum)
        template = ", and the chat template's" if chat else ""
        raise ConfigError(
            f"{len(too_long)} of {len(pairs)} requests can't fit the server's context of {limit} tokens "
            f"(max_model_len): the longest has {tokens} prompt tokens{template}, and asks for {output}, which makes "
            f"{tokens + output}; give shorter lengths or prompts, or start the server with a longer context"
        )


def _texts(content: Content) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for message in content:
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else [{"text": parts}]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
