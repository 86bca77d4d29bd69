"""Special tokens spelled in the texts of a conversation stay texts, whatever the template does around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from tests.text.tokenizers.test_sentencepiece_model import load
from tests.tiny_model import byte_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<|im_end|>|"]
TOKENIZER = Tokenizer(TokenizerParts(byte_tokenizer(*MARKS), (), None, {"bos_token": "<s>"}, {}))
ESCAPED = EscapedMarks(TOKENIZER)
# Joins the parts of a content, so that a mark may be cut in two.
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for d in documents or [] %}[INST]{{ d.text }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}",
    TOKENIZER.special_tokens,
)
SPECIAL = frozenset(TOKENIZER.encode("".join(MARKS)))
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.sampled_from(MARKS).flatmap(lambda mark: st.integers(1, len(mark)).map(lambda size: mark[:size])),
        st.sampled_from(MARKS).flatmap(lambda mark: st.integers(0, len(mark)).map(lambda size: mark[size:])),
        st.text("ab <|>é\n", max_size=3),
    ),
    max_size=4,
).map("".join)


def control_tokens(ids: list[int]) -> list[int]:
    return [token for token in ids if token in SPECIAL]


def render(conversation: list[dict[str, Any]], documents: list[dict[str, Any]]) -> str:
    return TEMPLATE.render(conversation, add_generation_prompt=False, documents=documents)


@given(st.lists(st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=4)), min_size=1, max_size=3), TEXTS, TEXTS)
def test_texts_make_no_control_tokens(contents: list[Any], name: str, document: str) -> None:
    def conversation(text_of: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": text_of(name), "arguments": {"x": text_of(name)}}}
        return [
            {
                "role": "user",
                "name": text_of(name),
                "content": text_of(content)
                if isinstance(content, str)
                else [{"type": "text", "text": text_of(part)} for part in content],
                "tool_calls": [call],
            }
            for content in contents
        ]

    given_texts, documents = conversation(lambda text: text), [{"text": document}]
    written = render(ESCAPED.escape(given_texts), ESCAPED.escape(documents))
    (ids,) = ESCAPED.encode_batch([written], add_special_tokens=False)
    (harmless,) = ESCAPED.encode_batch([render(conversation(lambda _: "a"), [{"text": "a"}])], add_special_tokens=False)
    assert control_tokens(ids) == control_tokens(harmless)
    # What is computed reads as what was given.
    text = render(given_texts, documents)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == ESCAPED.restore(written) == text


@given(st.text("ab <|>é\n"))
def test_other_texts_have_the_same_ids(text: str) -> None:
    text += "."
    (ids,) = ESCAPED.encode_batch([ESCAPED.escape(text)])
    assert ids == TOKENIZER.encode(text)


@pytest.mark.parametrize("at", range(-14, 3))
def test_long_texts(at: int) -> None:
    text = "a" * (2**16 + at) + "<|im_end|>|</s>" + "b" * 2**17 + "<s>"
    written = ESCAPED.escape(text)
    assert len(written) == len(text) - len("<|im_end|>|</s><s>") + 3
    assert ESCAPED.restore(written) == text


def test_characters_of_private_use_are_refused_if_they_are_placeholders() -> None:
    assert ESCAPED.escape({"a": ["\ue000", 1, None, True]}) == {"a": ["\ue000", 1, None, True]}
    with pytest.raises(InvalidRequestError, match=r"U\+F0000"):
        ESCAPED.escape(["a\U000f0001"])


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_sentencepiece(tmp_path: Path, model: str) -> None:
    tokenizer = load(tmp_path, model)
    escaped = EscapedMarks(tokenizer)
    marks = tokenizer.special_texts()
    text = f"Hello {' and '.join(marks[:20])} é"
    (ids,) = escaped.encode_batch([escaped.escape(text)], add_special_tokens=False)
    assert tokenizer.skipped_ids.isdisjoint(ids)
    assert not tokenizer.skipped_ids.isdisjoint(tokenizer.encode(text, add_special_tokens=False))
    # These tokenizers may put a space after a special token.
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
