"""Budgets for reasoning: the closing follows in the same event, other requests go on, and no book is out of order."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from jaxserve.api_types import EngineRequest, FinishReason, ThinkingBudget, TokenEvent
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.step_plan import Capacity
from jaxserve.text.answers.thought_marks import make_marks
from tests.drafts import AnyLengths
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, next_token, run_alone
from tests.grammars import TOKENS, encode, small_grammars
from tests.thinking import random_budget

END = encode("world")


def make_scheduler(capacity: Capacity | None = None, **options: Any) -> Scheduler:
    limits = {"chunked_prefill_size": 8, "max_prefill_tokens": 64, "max_num_batched_tokens": 64}
    return Scheduler(capacity or make_capacity(), **(limits | {"conservativeness": 0.0} | options))


def thinking(num_tokens: int, *, end: bytes = b"world", **options: Any) -> ThinkingBudget:
    """Return the budget of an output that begins inside of its reasoning."""
    marks = make_marks(TOKENS, (b"{",), (end,), (tuple(encode(end.decode())),), once=True)
    return msgspec.structs.replace(marks.budget(num_tokens, inside=True), **options)


def with_budget(request: EngineRequest, budget: ThinkingBudget) -> EngineRequest:
    return msgspec.structs.replace(request, thinking=budget)


def unending(request_id: str, *, num_prompt_tokens: int = 4, **sampling: Any) -> EngineRequest:
    """Return a request whose model doesn't end its reasoning by itself."""
    for number in range(1000):
        request = make_request(f"{request_id}", [number % 64, *range(num_prompt_tokens - 1)], **sampling)
        if END[0] not in run_alone(request, 64).token_ids:
            return request
    raise AssertionError("each request ends its reasoning")


def constrained(regex: str, **sampling: Any) -> EngineRequest:
    """Return a request with a grammar that reasons for more than six tokens by itself."""
    grammar = LLMatcher.grammar_from_regex(regex)
    for number in range(1000):
        request = make_request("a", [number % 64, number // 64], max_tokens=40, **sampling)
        request = msgspec.structs.replace(request, grammar=grammar)
        if b"".join(TOKENS[token] for token in run_alone(request, 64).token_ids).find(b"world") > 6:
            return request
    raise AssertionError("each request ends its reasoning")


def run(scheduler: Scheduler, *requests: EngineRequest, overlap: bool = True) -> dict[str, list[TokenEvent]]:
    loop = EngineLoop(scheduler, FakeExecutor(scheduler._capacity), overlap=overlap)
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert loop.add(request) is None
    while loop.has_work:
        for event in loop.step():
            events[event.request_id].append(event)
        assert scheduler.check_integrity() == []
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5, 19])
def test_the_closing_comes_with_the_last_token_of_the_budget(budget: int, overlap: bool) -> None:
    request = with_budget(unending("a", max_tokens=30), thinking(budget))
    scheduler = make_scheduler()
    [events] = run(scheduler, request, overlap=overlap).values()

    expected = run_alone(request, 64).token_ids
    assert tokens_of(events) == expected
    assert expected[budget] == END[0]
    assert END[0] not in expected[:budget]
    assert len(expected) == 30
    assert events[max(budget - 1, 0)].token_ids[-1] == END[0]
    stats = scheduler.stats()
    assert stats.forced_tokens == 1
    assert stats.num_retractions == stats.num_preemptions == 0
    assert stats.generation_tokens == 30
    assert stats.prompt_tokens == stats.cache_query_tokens == 4


def test_a_natural_end_within_the_budget_changes_nothing() -> None:
    request = make_request("a", max_tokens=30)
    natural = run_alone(request, 64).token_ids
    end = TOKENS[natural[6]]
    budget = thinking(12, end=end)
    [events] = run(make_scheduler(), with_budget(request, budget)).values()
    assert tokens_of(events) == natural


def test_requests_beside_it_go_on_in_every_step() -> None:
    plain = make_request("plain", max_tokens=40)
    scheduler = make_scheduler()
    loop = EngineLoop(scheduler, executor := FakeExecutor(scheduler._capacity))
    for request in (with_budget(unending("a", max_tokens=40), thinking(9)), plain):
        assert loop.add(request) is None
    while loop.has_work:
        loop.step()
    with_plain = [any(chunk.request_id == "plain" for chunk in plan.chunks) for plan in executor.plans]
    first = with_plain.index(True)
    assert all(with_plain[first : first + 40])


def test_before_its_reasoning_one_token_more_may_be_planned() -> None:
    """A blank may be followed by reasoning, anything else not: then nothing is counted any more."""
    blank, other = encode(" ")[0], encode("a")[0]
    sampling = make_request("a").sampling
    for first, is_counted in ((blank, True), (other, False)):
        prompt = next(n for n in range(4096) if next_token([n % 64, n // 64], 0, sampling, ()) == first)
        request = make_request("a", [prompt % 64, prompt // 64], max_tokens=30)
        scheduler = make_scheduler()
        loop = EngineLoop(scheduler, FakeExecutor(scheduler._capacity), overlap=False)
        assert loop.add(with_budget(request, thinking(3, inside=False))) is None
        loop.step()
        [running] = scheduler._table.running
        assert (running.thinking is not None) == is_counted
        assert running.pause_at == (1 + 1 + 3 if is_counted else 30)


@pytest.mark.parametrize("logprobs", [0, 2])
def test_each_token_has_a_log_probability(logprobs: int) -> None:
    request = with_budget(unending("a", max_tokens=12, logprobs=logprobs), thinking(5))
    [events] = run(make_scheduler(), request).values()
    assert all(event.logprobs is not None and len(event.logprobs) == len(event.token_ids) for event in events)
    entries = [entry for event in events for entry in event.logprobs or ()]
    assert [entry.token_id for entry in entries] == tokens_of(events)
    assert entries[5].logprob == 0.0
    assert entries[5].top_ids == ([END[0]] if logprobs else [])


def test_an_output_may_end_within_the_closing() -> None:
    request = unending("a", max_tokens=6)
    closing = (1, 2, END[0])
    for limit, stop_ids, reason in ((6, (), "length"), (9, (2,), "stop")):
        budget = thinking(4, closings=(closing,))
        sampling = msgspec.structs.replace(request.sampling, max_tokens=limit)
        given = msgspec.structs.replace(request, stop_ids=stop_ids, thinking=budget, sampling=sampling)
        [events] = run(make_scheduler(), given).values()
        assert tokens_of(events)[4:] == [1, 2]
        assert events[-1].finish_reason == reason
        assert events[-1].stop_id == (2 if stop_ids else None)


def test_a_closing_that_fills_the_whole_cache_is_an_error() -> None:
    capacity = make_capacity(num_pages=3)
    request = with_budget(unending("a", max_tokens=40), thinking(7, closings=((1, 2, 3, END[0]),)))
    [events] = run(make_scheduler(capacity), request).values()
    assert events[-1].finish_reason is FinishReason.ERROR
    assert "fills the whole KV cache" in (events[-1].error or "")
    assert len(tokens_of(events)) == 7 + 4


def test_the_pages_before_the_closing_are_found_again() -> None:
    scheduler = make_scheduler()
    loop = EngineLoop(scheduler, executor := FakeExecutor(scheduler._capacity))
    assert loop.add(with_budget(unending("a", max_tokens=20), thinking(9))) is None
    while loop.has_work:
        loop.step()
    first, again = [opened for plan in executor.plans for opened in plan.opens]
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 12  # of 4 + 9, whose last token no step has computed
    assert len(again.output_ids) == 10


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_grammar_is_followed_through_the_closing(one_by_one: bool) -> None:
    request = constrained("[a-k]{1,30}world(hello)[0-9]{3}", logprobs=0 if one_by_one else None)
    request = with_budget(request, thinking(6))
    scheduler = make_scheduler(grammars=small_grammars())
    [events] = run(scheduler, request).values()
    text = b"".join(TOKENS[token] for token in tokens_of(events))
    assert text[6:16] == b"worldhello"
    assert len(text) == 19
    assert events[-1].finish_reason is FinishReason.STOP
    assert scheduler.stats().forced_tokens == (0 if one_by_one else 5)
    assert tokens_of(events) == run_alone(request, 64).token_ids


def test_a_closing_waits_until_the_grammar_allows_it() -> None:
    request = with_budget(constrained("([a-c][d-f]){1,20}world[0-9]"), thinking(5))
    [events] = run(make_scheduler(grammars=small_grammars()), request).values()
    text = b"".join(TOKENS[token] for token in tokens_of(events))
    assert text[6:11] == b"world"


@given(seed=st.integers(0, 2**32), overlap=st.booleans(), drafts=st.integers(0, 4), pages=st.integers(16, 40))
def test_any_budgets_under_memory_pressure(seed: int, overlap: bool, drafts: int, pages: int) -> None:
    rng = random.Random(seed)
    capacity = make_capacity(num_pages=pages, rotation_length=rng.choice([None, 20]))
    if drafts:
        capacity = msgspec.structs.replace(capacity, max_drafts=drafts, verify_buckets=(4 * (1 + drafts),))
    speculation = AnyLengths(capacity, rng) if drafts else None
    requests = []
    for number in range(6):
        shared = [1, 2, 3, 4, 5] if number % 2 else rng.choices(range(64), k=rng.randint(1, 9))
        request = make_request(f"r{number}", shared, max_tokens=rng.randint(1, 40), seed=number, temperature=1.0)
        request = msgspec.structs.replace(request, sample=number)
        requests.append(with_budget(request, random_budget(rng)) if rng.random() < 0.8 else request)
    scheduler = make_scheduler(capacity, speculation=speculation)
    found = run(scheduler, *requests, overlap=overlap)
    for request in requests:
        expected = run_alone(request, 64)
        events = found[request.request_id]
        assert tokens_of(events) == expected.token_ids
        assert events[-1].finish_reason is expected.finish_reason
