"""The engine's count of reasoning agrees with the readers of answers, however tokens divide a text."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from jaxserve.api_types import ThinkingBudget
from jaxserve.engine.scheduling.grammars import Grammars, RequestGrammar
from jaxserve.engine.scheduling.thinking import ThinkingCounter
from jaxserve.text.answers.answer import Answer
from jaxserve.text.answers.formats import ReasoningFormat, choose_formats
from jaxserve.text.answers.harmony import MARKS
from jaxserve.text.answers.held import whole_answer
from jaxserve.text.answers.thought_marks import ThoughtMarks, make_marks, thought_marks
from jaxserve.text.grammars.vocabulary import load_vocabulary
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from tests.tiny_model import byte_tokenizer

ANALYSIS = "<|channel|>analysis<|message|>"
# Parts of answers by the format of their reasoning.
PARTS = {
    "deepseek_r1": ["<think>", "</think>", "<", "</thi", "nk>", "think", " <think", ">"],
    "seed_oss": ["<seed:think>", "</seed:think>", "<seed:", "think>", "</seed"],
    "gemma4": ["<|channel>thought", "<channel|>", "<|channel>", "thought", "<chan"],
    "granite": ["Here is my thought process:", "Here's my response:", "Here is my ", "response:", "Here"],
    # A header is written whole: the reader says more about others than the counter can know
    "gpt_oss": [ANALYSIS, "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", "<|return|>", "<|end"],
}
ANY = ["a", " ", "\n", "\u3000", "\xa0", "é", "<", "b c", "ssis"]


def _format(name: str) -> ReasoningFormat:
    reasoning = choose_formats("", reasoning=name).reasoning
    assert reasoning is not None
    return reasoning


def _tokenizer(*special: str) -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_tokenizer("<s>", "</s>", *special), (257,), 256, {}, {}))


@functools.cache
def _marks(name: str) -> ThoughtMarks:
    return thought_marks(_format(name), _tokenizer(), shows_special_tokens=True)


def _is_inside(budget: ThinkingBudget, ids: Sequence[int]) -> bool:
    """Return whether the counter says that an output is inside of its reasoning."""
    counter = ThinkingCounter(budget)
    counter.push(ids)
    return counter.is_used_up


def _reader_is_inside(name: str, text: bytes, *, inside: bool) -> bool:
    """Return whether the reader would say that more text is reasoning."""
    answer = Answer([_format(name).read(inside=inside)])
    answer.push((text + b"\0").decode(errors="replace"))  # what comes next decides about the beginning of a mark
    return answer.reasoning_end > len(text)


@pytest.mark.parametrize("name", PARTS)
@given(data=st.data())
def test_the_count_agrees_with_the_reader(name: str, data: st.DataObject) -> None:
    inside = data.draw(st.booleans()) and name != "gpt_oss"
    pieces = st.lists(st.sampled_from(PARTS[name] + ANY), max_size=12)
    answer = "".join(data.draw(pieces)).encode()
    if name == "gpt_oss" and data.draw(st.booleans()):
        answer = ANALYSIS.encode() + answer
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=12))
    ends = sorted({*cuts, len(answer)})
    tokens = [answer[start:end] for start, end in zip([0, *ends], ends) if start < end]
    vocabulary = list(
        dict.fromkeys([*tokens, b"x", *data.draw(pieces.map(lambda some: [part.encode() for part in some]))])
    )
    marks = _marks(name)
    marks = make_marks(vocabulary, marks.begins, marks.ends, ((0,),), once=marks.once)
    ids = [vocabulary.index(token) for token in tokens]

    budget = marks.budget(0, inside=inside)
    for count in range(1, len(ids) + 1):
        text = b"".join(tokens[:count])
        assert _is_inside(budget, ids[:count]) == _reader_is_inside(name, text, inside=inside), text


@pytest.mark.parametrize("name", PARTS)
@given(data=st.data())
def test_no_budget_is_used_up_before_its_bound(name: str, data: st.DataObject) -> None:
    """The planner relies on this number: no tokens, however chosen, use up the budget sooner."""
    vocabulary = [part.encode() for part in PARTS[name] + ANY]
    marks = _marks(name)
    marks = make_marks(vocabulary, marks.begins, marks.ends, ((0,),), once=marks.once)
    budget = marks.budget(data.draw(st.integers(0, 3)), inside=data.draw(st.booleans()) and name != "gpt_oss")
    counter = ThinkingCounter(budget)
    earliest, count = counter.num_free, 0
    while not counter.is_used_up and count < 12 and not counter.is_over:
        counter.push([data.draw(st.sampled_from(range(len(vocabulary))))])
        count += 1
        earliest = max(earliest, count + counter.num_free)
        assert counter.num_free > 0 or counter.is_used_up
    assert not counter.is_used_up or count >= earliest


def test_tokens_count_up_to_the_budget() -> None:
    marks = thought_marks(_format("deepseek_r1"), _tokenizer("<think>", "</think>"), shows_special_tokens=True)
    begin, end = 258, 259
    assert marks.closings == ((end,),)
    counter = ThinkingCounter(marks.budget(2, inside=False))
    assert counter.num_free == 3
    counter.push([10, begin, 97])
    assert not counter.is_used_up
    assert counter.num_free == 1
    counter.push([98])
    assert counter.is_used_up
    counter.close()
    assert counter.is_over
    assert not counter.is_used_up


def test_channels_are_closed_first_for_any_message_then_for_the_last() -> None:
    tokenizer = _tokenizer(*MARKS)
    marks = thought_marks(_format("gpt_oss"), tokenizer, shows_special_tokens=True)
    analysis = tokenizer.encode(ANALYSIS)
    assert marks.num_begin_tokens == len(analysis) == 10
    counter = ThinkingCounter(marks.budget(1, inside=False))
    counter.push([*tokenizer.encode("<|channel|>final<|message|>Hi<|end|><|start|>assistant"), *analysis])
    assert not counter.is_used_up
    counter.push(b"a")
    closings = []
    for _ in range(3):
        assert counter.is_used_up
        closings.append(tokenizer.decode(counter.closing(), skip_special_tokens=False))
        counter.close()
        assert not counter.is_used_up
        assert not counter.is_over
        counter.push(analysis)
    again = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert closings == ["<|end|><|start|>assistant", again, again]


@pytest.mark.parametrize("shows", [True, False])
def test_special_tokens_count_as_text_where_answers_show_them(shows: bool) -> None:
    tokenizer = _tokenizer()
    marks = thought_marks(_format("deepseek_r1"), tokenizer, shows_special_tokens=shows)
    counter = ThinkingCounter(marks.budget(0, inside=False))
    counter.push([256, *b"<th", 256, *b"ink>"])
    assert counter.is_over == shows
    assert counter.is_used_up != shows


@pytest.mark.parametrize(
    ("name", "special", "inside", "begin", "end"),
    [
        ("deepseek_r1", True, True, "", "</think>"),
        ("deepseek_r1", False, True, "", "</think>"),
        ("deepseek_r1", True, False, "<think>", "</think>"),
        ("deepseek_r1", False, False, "<think>", "</think>"),
        ("granite", False, False, "Here is my thought process:", "Here is my response:"),
        ("gemma4", True, False, "<|channel>thought", "<channel|>"),
        ("gpt_oss", True, False, ANALYSIS, "<|end|><|start|>assistant"),
    ],
)
def test_a_grammar_is_followed_through_the_end(name: str, special: bool, inside: bool, begin: str, end: str) -> None:
    texts = (*MARKS, "<|constrain|>", "<think>", "</think>", "<|channel>", "<channel|>") if special else ()
    tokenizer = _tokenizer(*texts)
    formats = choose_formats("", reasoning=name)
    marks = thought_marks(_format(name), tokenizer, shows_special_tokens=True)
    grammar = RequestGrammar(
        whole_answer(LLMatcher.grammar_from_regex("[0-9]{3}"), formats, tokenizer, inside=inside),
        stop_ids=(257,),
        min_tokens=0,
        ignore_eos=False,
        one_by_one=False,
    )
    grammar.thinking = ThinkingCounter(marks.budget(4, inside=inside))
    grammars = Grammars(lambda: load_vocabulary(tokenizer))
    written: list[int] = []
    # The fourth token of the thought is the first byte of a character
    waiting = [*tokenizer.encode(begin), *"Hm é".encode()]
    while not grammar.found.complete and len(written) < 100:
        grammars.submit([grammar])
        assert grammar.job is not None
        grammar.job.result()
        found = grammar.found
        assert found.error is None
        written += found.forced
        if len(written) <= len(tokenizer.encode(begin)):  # the grammar may force a part of it
            waiting = waiting[len(found.forced) :]
        if not found.complete:
            allowed = (token for token in range(tokenizer.vocab_size) if found.tokens[token // 8] >> token % 8 & 1)
            written.append(waiting.pop(0) if waiting else next(allowed))
            grammar.push(written[-1])
    text = tokenizer.decode(written, skip_special_tokens=False)
    assert text.startswith(f"{begin}Hm é{end}")
