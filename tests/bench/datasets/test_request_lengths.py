from __future__ import annotations

import pytest

from jaxserve.bench.datasets.prompts import BenchConversation, Content, DatasetPrompt, single_prompt
from jaxserve.bench.datasets.request_lengths import check_context, request_lengths
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError
from tests.bench.word_tokenizer import word_tokenizer

TOKENIZER = word_tokenizer()
TURNS = BenchConversation((DatasetPrompt(" baba cece", None, 3), DatasetPrompt(" didi", None, 3)), system=" fofo")
PARTS = [{"role": "system", "content": " baba"}, {"role": "user", "content": [{"type": "text", "text": " cece didi"}]}]


@pytest.mark.parametrize(
    ("conversation", "in_texts", "in_chats"),
    [
        (single_prompt(" baba cece", None, 3), [3], [2]),
        (single_prompt([1, 2, 3, 4], 4, 3), [4], [4]),
        (single_prompt(PARTS, None, 3), [4], [3]),
        (single_prompt([{"role": "assistant", "content": None, "tool_calls": []}], None, 3), [1], [0]),
        (TURNS, [4, 5], [3, 4]),
    ],
)
def test_a_request_has_the_tokens_of_its_texts_and_of_the_turns_before(
    conversation: BenchConversation, in_texts: list[int], in_chats: list[int]
) -> None:
    assert request_lengths(conversation, Vocabulary(TOKENIZER)) == in_texts
    assert request_lengths(conversation, Vocabulary(TOKENIZER, chat=True)) == in_chats


def test_lengths_are_unknown_without_a_tokenizer() -> None:
    assert request_lengths(TURNS, Vocabulary(None)) == [None, None]
    assert request_lengths(single_prompt([1, 2], 2, 3), Vocabulary(None)) == [2]


@pytest.mark.parametrize(("content", "tokens"), [("a", 7), ("a", None)])
def test_only_what_can_not_fit_is_refused(content: Content, tokens: int | None) -> None:
    made, least = [single_prompt(content, tokens, 3)], tokens or 1
    check_context(made, [[tokens]], least + 3, chat=False)
    with pytest.raises(ConfigError, match=f"1 of 1 requests can't fit the server's context of {least + 2} tokens"):
        check_context(made, [[tokens]], least + 2, chat=True)
