from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.load.sse import EventSplitter

STREAM = b': hello\r\n\r\nevent: x\ndata: {"a":1}\n\ndata:two\ndata: lines\n\nid: 7\r\ndata: [DONE]\r\n\r\n'
EVENTS = [b'{"a":1}', b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_wherever_the_bytes_are_split(cuts: list[int]) -> None:
    splitter = EventSplitter()
    borders = [0, *sorted(cuts), len(STREAM)]
    assert [event for a, b in pairwise(borders) for event in splitter.feed(STREAM[a:b])] == EVENTS
    assert splitter.finish() == []


def test_the_last_event_needs_no_empty_line_when_the_stream_has_ended() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b") == [b"a"]
    assert splitter.finish() == [b"b"]


def test_an_error_line_is_data() -> None:
    assert EventSplitter().feed(b'error: {"error": {"message": "no"}}\n\n') == [b'{"error": {"message": "no"}}']
