from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.text.pair_forms import (
    PairTemplate,
    check_instruction,
    choose_form,
    encode_pairs,
    encode_written_pairs,
    is_pair_template,
    qwen3_pair,
)
from jaxserve.text.pooled_texts import TextLimits
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
from tests.server.pooling.tasks import RERANK
from tests.server.tiny import END_ID, START_ID, TEMPLATE, tiny_tokenizer
from tests.text.test_pooled_texts import backend, tokenizer

QWEN3 = dataclasses.replace(RERANK, pair_template="qwen3_reranker")
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
OWN = tiny_tokenizer()
MARKS = EscapedMarks(OWN)


def qwen3_ids(query: str, document: str, *, instruction: str | None = None, **limits: Any) -> list[int]:
    pair = qwen3_pair(query, document, instruction, MARKS)
    asked = TextLimits(**{"longest": 10_000} | limits)
    [found] = encode_written_pairs(OWN, MARKS, [pair], asked, ["documents[0]"])
    assert found.second_start is None
    return found.ids


def card_ids(query: str, document: str, instruction: str = INSTRUCTION) -> list[int]:
    return OWN.encode(CARD.format(instruction=instruction, query=query, document=document))


def test_which_form_a_model_has():
    score_template = "{{ (messages | selectattr('role', 'eq', 'query') | first).content }} {{ \"document\" }}"
    assert choose_form(RERANK, None, TEMPLATE) == "tokenizer"
    assert choose_form(QWEN3, None, TEMPLATE) == "qwen3_reranker"
    assert choose_form(RERANK, "qwen3_reranker", score_template) == "qwen3_reranker"
    assert choose_form(QWEN3, "score.jinja", score_template) == "template"
    assert is_pair_template("<Query>: {{ messages[0].content }}\n<Document>: {{ messages[1].content }}")
    assert not is_pair_template("{% if documents %}<documents>{{ 'document' }}{% endif %}")


def test_the_prompt_of_qwen3_reranker():
    assert qwen3_ids("q", "d") == card_ids("q", "d")
    assert qwen3_ids("q", "d", instruction="Find it") == card_ids("q", "d", "Find it")


def test_texts_spell_no_special_tokens():
    ids = qwen3_ids("q<|im_end|>", "d<|im_start|>", instruction="<|im_end|>")
    assert (ids.count(START_ID), ids.count(END_ID)) == (3, 2)


def test_texts_in_the_form_of_the_model_card_stay_as_they_are():
    before, after = CARD.format(instruction="i", query="q", document="|").split("|im_end|>\n<|im_start|>user")
    query, document = f"{before}|im_end|>\n<|im_start|>user{after.partition('<Document>')[0]}", "<Document>: d"
    document += CARD.partition("{document}")[2]
    assert qwen3_ids(query, document, instruction="ignored") == OWN.encode(query + document)
    cut = qwen3_ids(query, document.replace("d<", "d" * 90 + "<"), longest=250, truncates=True)
    end = OWN.encode(CARD.partition("{document}")[2])
    assert len(cut) == 250
    assert cut[-len(end) :] == end


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_the_document_is_truncated(side: Any):
    document = "abcdefghijklmnopqrstuvwxyz"
    longest = len(card_ids("q", "")) + 4
    kept = "abcd" if side == "right" else "wxyz"
    assert qwen3_ids("q", document, longest=longest, truncates=True, side=side) == card_ids("q", kept)
    assert qwen3_ids("q", document, longest=len(card_ids("q", document))) == card_ids("q", document)
    with pytest.raises(ContextLengthError, match=rf"documents\[0\] resulted in {len(card_ids('q', document))} tokens"):
        qwen3_ids("q", document, longest=longest)
    with pytest.raises(InvalidRequestError, match="leaves none for it"):
        qwen3_ids("q", document, longest=longest - 4, truncates=True)


@pytest.mark.parametrize("pair", [None, "<s> $A </s> <s> $B </s>", "<s> $A </s> $B:1 </s>:1", "$A </s> <s>:1 $B:1"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizers_own_form(pair: str | None, side: Any):
    """The reference is what `tokenizers` makes of a pair, and its truncation of the longer text."""
    reference, own = backend("$A </s>", pair), tokenizer("$A </s>", pair)
    texts = (
        ("q", "d"),
        ("query", "a long document"),
        ("q", "another one"),
        ("a long query", "d"),
        ("as long", "as this"),
    )
    names = [f"d{number}" for number in range(len(texts))]

    def expected() -> list[tuple[list[int], int | None]]:
        encoded = [reference.encode(*each) for each in texts]
        types = [each.type_ids for each in encoded]
        return [(each.ids, of.index(1) if 1 in of else None) for each, of in zip(encoded, types)]

    assert encode_pairs(own, texts, TextLimits(100), names) == expected()
    for longest in (12, 11, 7):
        reference.enable_truncation(longest, strategy="longest_first", direction=side)
        assert encode_pairs(own, texts, TextLimits(longest, True, side), names) == expected()
    with pytest.raises(ContextLengthError, match="your d1 resulted in"):
        encode_pairs(own, texts, TextLimits(12), names)


def test_a_pair_that_leaves_no_tokens_for_its_texts_is_refused():
    with pytest.raises(InvalidRequestError, match="3 tokens stand around the text of d"):
        encode_pairs(tokenizer("$A", "<s> $A </s> $B </s>"), [("ab", "c")], TextLimits(4, True), ["d"])


@pytest.mark.parametrize("pair", ["$A:1 $B:0", "$A:0 $B:1 </s>:0", "<s>:1 $A:1 $B:1"])
def test_types_in_another_order_are_refused(pair: str):
    with pytest.raises(ConfigError, match="doesn't give type 0 to a first text"):
        encode_pairs(tokenizer("$A", pair), [("a", "b")], TextLimits(100), ["d"])


def test_a_template_gets_no_special_tokens_beside_those_that_it_writes():
    own = tokenizer("<s> $A </s>")
    marks = EscapedMarks(own)
    pair = qwen3_pair("q", "d", "i", marks)._replace
    for text in ("a:b", "<s>a:b"):
        pairs = [pair(text=text, without=text[:-1])]
        [found] = encode_written_pairs(own, marks, pairs, TextLimits(9), ["d"])
        assert found.ids == ([256] if text.startswith("<s>") else []) + [*b"a:b"]


def test_an_instruction_without_a_place_is_refused():
    check_instruction("tokenizer", None)
    check_instruction("template", "x")
    PairTemplate(RERANK, "{{ messages }}").check({}, None)
    with pytest.raises(InvalidRequestError, match="instruct: this model's form"):
        PairTemplate(RERANK, "{{ messages }}").check({}, ("instruct", "x"))
    with pytest.raises(InvalidRequestError, match="instruct: this model's form") as error:
        check_instruction("tokenizer", "x", param="instruct")
    assert error.value.param == "instruct"
