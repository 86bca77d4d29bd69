from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, TokenEvent, TokenLogprobs, Usage
from jaxserve.text.output import OutputDelta, OutputProcessor, OutputSoFar
from tests.text import small_tokenizers

tokenizer = functools.cache(small_tokenizers.byte_level)
EOS = 1


def ids_of(text: str) -> list[int]:
    """Return one token per byte, so that tests know where tokens begin."""
    return [id_ for char in text for id_ in tokenizer().encode(char)]


def request(prompt: str = "Hello", **sampling: Any) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_ids=tokenizer().encode(prompt),
        sampling=SamplingParams(max_tokens=100, **sampling),
        stop_ids=(EOS,),
    )


def event(ids: list[int], **fields: Any) -> TokenEvent:
    return TokenEvent("r", ids, **fields)


def run(request: EngineRequest, events: list[TokenEvent]) -> list[OutputDelta]:
    processor = OutputProcessor(tokenizer(), request)
    deltas = []
    for each in events:
        deltas.append(processor.push(each))
        assert processor.finished == (deltas[-1].finish_reason is not None)
        if processor.finished:
            break
    return deltas


def one_by_one(text: str, **last: Any) -> list[TokenEvent]:
    ids = ids_of(text)
    return [event([token_id]) for token_id in ids[:-1]] + [event(ids[-1:], **last)]


def test_text_and_usage_of_an_output_that_ends_by_length() -> None:
    usage = Usage(prompt_tokens=99, completion_tokens=99, cached_tokens=3)
    deltas = run(request(), one_by_one("abc", finish_reason=FinishReason.LENGTH, usage=usage))

    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert [delta.usage for delta in deltas[:-1]] == [None, None]
    assert deltas[-1].usage == Usage(len(request().prompt_ids), 3, 3)
    assert not deltas[-1].abort


def test_eos_is_counted_without_text_or_stop_reason() -> None:
    (delta,) = run(request(), [event([*ids_of("hi"), EOS], finish_reason=FinishReason.STOP, stop_id=EOS)])

    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hi", FinishReason.STOP, None)
    assert delta.token_ids == [*ids_of("hi"), EOS]
    assert delta.usage is not None
    assert delta.usage.completion_tokens == 3


def test_the_requests_stop_id_is_the_stop_reason() -> None:
    (stop,) = ids_of("x")
    (delta,) = run(
        request(stop_token_ids=(stop,), skip_special_tokens=False),
        [event([*ids_of("hix")], finish_reason=FinishReason.STOP, stop_id=stop)],
    )

    assert (delta.text, delta.stop_reason, delta.finish_reason) == ("hi", stop, FinishReason.STOP)


def test_a_stop_id_before_min_tokens_is_text() -> None:
    (stop,) = ids_of("x")
    (delta,) = run(request(), [event(ids_of("axbx"), finish_reason=FinishReason.STOP, stop_id=stop)])

    assert delta.text == "axb"


def test_a_stop_string_across_tokens_ends_the_output_and_aborts() -> None:
    deltas = run(request(stop=("END",)), one_by_one("to ENDless"))

    assert [delta.text for delta in deltas] == ["t", "o", " ", "", "", ""]
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason, last.abort) == (FinishReason.STOP, "END", True)
    assert last.usage == Usage(len(request().prompt_ids), 6)


def test_text_after_a_stop_string_is_dropped() -> None:
    ids = ids_of("to ENDless")
    logprobs = [TokenLogprobs(token_id, -1.0, [], []) for token_id in ids]
    (delta,) = run(
        request(stop=("END",), logprobs=0), [event(ids, finish_reason=FinishReason.LENGTH, logprobs=logprobs)]
    )

    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("to ", FinishReason.STOP, "END")
    assert not delta.abort  # the engine has already ended it
    assert delta.token_ids == ids[:6]
    assert delta.logprobs == logprobs[:6]
    assert delta.text_offsets == [0, 1, 2, 3, 4, 5]
    assert delta.usage is not None
    assert delta.usage.completion_tokens == 6


def test_a_stop_string_can_be_kept() -> None:
    deltas = run(request(stop=("END",), include_stop_str_in_output=True), one_by_one("to ENDless"))

    assert "".join(delta.text for delta in deltas) == "to END"


def test_held_back_text_is_returned_at_the_end() -> None:
    deltas = run(request(stop=("END",)), one_by_one("to EN", finish_reason=FinishReason.LENGTH))

    assert deltas[-1].text == "EN"
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    by_eos = run(
        request(stop=("END",)), [*one_by_one("to EN"), event([EOS], finish_reason=FinishReason.STOP, stop_id=EOS)]
    )
    assert by_eos[-1].text == "EN"


def test_half_a_character_is_held_back_until_the_end() -> None:
    first, *_ = tokenizer().encode("ß")
    whole = ids_of("ß")
    halves = [tokenizer()._backend.token_to_id(char) for char in "ÃŁ"]
    assert tokenizer().decode(halves) == "ß"
    assert first in (halves[0], whole[0])

    assert [delta.text for delta in run(request(), [event(halves[:1]), event(halves[1:])])] == ["", "ß"]
    deltas = run(request(), [event(halves[:1], finish_reason=FinishReason.LENGTH)])
    assert deltas[0].text == "\ufffd"
    offsets = run(request(), [event([*ids_of("a"), *halves, *ids_of("b")])])[0].text_offsets
    assert offsets == [0, 1, 1, 2]


def test_a_stop_string_in_the_prompt_does_not_match() -> None:
    deltas = run(request("the EN", stop=("END", "the")), one_by_one("D of it", finish_reason=FinishReason.LENGTH))

    assert "".join(delta.text for delta in deltas) == "D of it"


def test_stop_strings_match_after_min_tokens() -> None:
    deltas = run(request(stop=("x",), min_tokens=3), one_by_one("axxxbx"))

    assert "".join(delta.text for delta in deltas) == "axx"
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 4


def test_prompt_logprobs_are_passed_on_once() -> None:
    prompt_logprobs = [None, TokenLogprobs(5, -0.5, [5], [-0.5])]
    deltas = run(request(), [event(ids_of("a"), prompt_logprobs=prompt_logprobs), event(ids_of("b"))])

    assert [delta.prompt_logprobs for delta in deltas] == [prompt_logprobs, None]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_errors_and_aborts_keep_the_text_so_far(reason: FinishReason) -> None:
    deltas = run(request(stop=("END",)), [*one_by_one("to E"), event([], finish_reason=reason, error="engine died")])

    assert "".join(delta.text for delta in deltas) == "to E"
    assert (deltas[-1].finish_reason, deltas[-1].error, deltas[-1].abort) == (reason, "engine died", False)
    assert deltas[-1].usage is not None


def test_an_event_after_the_end_is_an_error() -> None:
    processor = OutputProcessor(tokenizer(), request())
    processor.push(event([], finish_reason=FinishReason.ABORT))

    with pytest.raises(AssertionError, match="request r got an event after its end"):
        processor.push(event([5]))


@given(data=st.data())
def test_any_split_into_events_gives_the_same_output(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer().vocab_size - 1), min_size=1, max_size=25))
    text = tokenizer().decode(ids)
    start = data.draw(st.integers(0, len(text)))
    stop = text[start : start + data.draw(st.integers(1, 4))] or "never"
    wanted = request(stop=(stop,), min_tokens=data.draw(st.integers(0, 3)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    parts = [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)])]

    split = run(wanted, [*map(event, parts[:-1]), event(parts[-1], finish_reason=FinishReason.LENGTH)])
    (whole,) = run(wanted, [event(ids, finish_reason=FinishReason.LENGTH)])

    assert "".join(delta.text for delta in split) == whole.text
    assert [token_id for delta in split for token_id in delta.token_ids] == whole.token_ids
    assert [offset for delta in split for offset in delta.text_offsets] == whole.text_offsets
    last = split[-1]
    assert (last.finish_reason, last.stop_reason, last.usage) == (whole.finish_reason, whole.stop_reason, whole.usage)
    if wanted.sampling.min_tokens == 0:
        assert whole.text == (text.split(stop)[0] if stop in text else text)


def test_what_was_added_is_as_if_it_had_come_at_once():
    entries = [TokenLogprobs(token, -1.0, [], []) for token in range(3)]
    output = OutputSoFar()
    output.add(OutputDelta("a", [5], entries[:1], [0], [None, entries[2]]))
    assert output.delta.text == "a"
    assert output.delta.finish_reason is None
    output.add(OutputDelta("bc", [6, 7], entries[1:], [1, 2]))
    output.add(OutputDelta("", finish_reason=FinishReason.STOP, stop_reason="x", matched_stop="x", usage=Usage(2, 3)))
    assert output.delta == OutputDelta(
        "abc", [5, 6, 7], entries, [0, 1, 2], [None, entries[2]], FinishReason.STOP, "x", "x", Usage(2, 3)
    )


def test_outputs_that_follow_each_other_become_one():
    entries = [TokenLogprobs(token, -1.0, [], []) for token in range(3)]
    held = OutputDelta("a", [5], entries[:1], [0])
    held.extend(OutputDelta("bc", [6, 7], entries[1:], [1, 2], [None], cached_tokens=3))
    end = OutputDelta(finish_reason=FinishReason.STOP, stop_reason="x", matched_stop="y", usage=Usage(2, 3))
    end.error, end.abort = "e", True
    held.extend(end)
    expected = OutputDelta("abc", [5, 6, 7], entries, [0, 1, 2], [None], FinishReason.STOP, "x", "y", Usage(2, 3), 3)
    expected.error, expected.abort = "e", True
    assert held == expected
