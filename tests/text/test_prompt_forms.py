from __future__ import annotations

from array import array
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.prompt_forms import read_conversations, read_prompt, read_prompts

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("abc", ["abc"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(1, 3), [[1, 2]]),
        (array("i", [1, 2]), [[1, 2]]),
        ({"prompt": "abc"}, ["abc"]),
        ({"prompt_token_ids": (1, 2)}, [[1, 2]]),
        ([], []),
        (["a", [1], {"prompt": "b"}, {"prompt_token_ids": [2]}, ""], ["a", [1], "b", [2], ""]),
        (({"prompt_token_ids": [2]}, "a"), [[2], "a"]),
    ],
)
def test_prompts_in_all_forms(given: Any, read: list[str | list[int]]) -> None:
    assert read_prompts(given) == read


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "the prompt is of type NoneType: a prompt is a text, a list of token ids, {\"prompt\": text} or"),
        (b"abc", "the prompt is of type bytes"),
        ({1, 2}, "the prompt is of type set"),
        (["a", 5], "prompts[1] is of type int"),
        (["a", b"abc"], "prompts[1] is of type bytes"),
        ([{"prompt": "a"}, None], "prompts[1] is of type NoneType"),
        ({}, "the prompt is {}: a prompt is"),
        ({"text": "a"}, "the prompt is {'text': str}: a prompt is"),
        ({"prompt": [1]}, "the prompt is {'prompt': list}"),
        ({"prompt_token_ids": "abc"}, "the prompt is {'prompt_token_ids': str}"),
        ({"prompt_token_ids": None}, "the prompt is {'prompt_token_ids': NoneType}"),
        (["a", {"prompt": "a", "multi_modal_data": {}}], "prompts[1] is {'prompt': str, 'multi_modal_data': dict}"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "the prompt is {'prompt': str, 'prompt_token_ids': list}"),
        ({"prompt_token_ids": [1, 2.0]}, "the prompt holds 2.0, which is not a token id"),
        ([[1], {"prompt_token_ids": [True]}], "prompts[1] holds True"),
        ([["a", "b"]], "prompts[0] holds 'a'"),
    ],
)  # fmt: skip
def test_other_prompts_are_refused_with_what_was_given(given: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_prompts(given)
    assert str(caught.value).startswith(says)


def test_one_prompt_is_not_a_list_of_them() -> None:
    assert read_prompt({"prompt": "abc"}) == "abc"
    with pytest.raises(InvalidRequestError, match="the prompt holds 'a'"):
        read_prompt(["a", "b"])  # type: ignore[arg-type]


def test_conversations() -> None:
    assert read_conversations([MESSAGE]) == read_conversations([[MESSAGE]]) == [[MESSAGE]]
    assert read_conversations([]) == []


@pytest.mark.parametrize(
    ("given", "kinds"),
    [("hi", "str"), (None, "NoneType"), (MESSAGE, "dict"), (["hi", "you"], "str"), ([MESSAGE, "hi"], "dict, str")],
)
def test_other_conversations_are_refused(given: Any, kinds: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"a conversation is a list of messages .*, got {kinds}$"):
        read_conversations(given)
