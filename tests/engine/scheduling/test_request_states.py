"""States in the scheduler: where requests begin, which rows they write, and which snapshots they leave.

Without another size, a state is at multiples of 4 tokens, and a page has 4. `FakeExecutor` fails if a step reads the
state of another sequence, or another state than the one at its border.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from jaxserve.api_types import EngineRequest, TokenEvent
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.kv_cache.radix_node import descendants
from jaxserve.engine.scheduling import request_states
from jaxserve.engine.scheduling.forced_runs import ForcedRuns
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.state_row import StateRow
from jaxserve.engine.speculation.speculation import DraftedRequest
from jaxserve.step_plan import Capacity, Chunk, SlotOpen, StateWrite, StepResult
from tests.drafts import AnyLengths
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, run_alone
from tests.engine.scheduling.test_scheduler import answer, make_scheduler, planned
from tests.grammars import small_grammars

PREFIX = list(range(20))


@pytest.fixture(autouse=True)
def _prompts_are_repeated_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let borders follow from the lengths of prompts alone."""
    monkeypatch.setattr(request_states, "NOT_REPEATED", 0)


class Server:
    """An engine that serves requests until all have ended, and checks their tokens."""

    def __init__(
        self,
        *,
        states: int = 12,
        block: int = 4,
        page_size: int = 4,
        overlap: bool = True,
        max_drafts: int = 0,
        sizes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.capacity = make_capacity(
            **{
                "num_pages": 256,
                "max_model_len": 512,
                "token_buckets": (64,),
                "num_states": states,
                "state_unit": max(block, page_size),
                "state_block": block,
                "page_size": page_size,
                "max_drafts": max_drafts,
                "verify_buckets": (4 * (1 + max_drafts),) if max_drafts else (),
                **(sizes or {}),
            }
        )
        speculation = AnyLengths(self.capacity, random.Random(1)) if max_drafts else None
        self.scheduler: Scheduler = make_scheduler(capacity=self.capacity, speculation=speculation, **settings)
        self.executor = FakeExecutor(self.capacity, overlap=overlap)
        self.loop = EngineLoop(self.scheduler, self.executor, overlap=overlap)

    def serve(self, *requests: EngineRequest) -> dict[str, TokenEvent]:
        """Return the last event of each request."""
        for request in requests:
            assert self.loop.add(request) is None
        return self.finish(*requests)

    def finish(self, *requests: EngineRequest) -> dict[str, TokenEvent]:
        events: list[TokenEvent] = []
        while self.loop.has_work:
            events += self.loop.step()
            assert self.scheduler.check_integrity() == []
        for request in requests:
            found = [token for event in events if event.request_id == request.request_id for token in event.token_ids]
            assert found == run_alone(request, self.capacity.max_model_len).token_ids
        return {event.request_id: event for event in events if event.finish_reason is not None}

    def cached(self, *requests: EngineRequest) -> list[int]:
        """Serve requests one after the other; return how many tokens of each were not computed."""
        found = []
        for request in requests:
            usage = self.serve(request)[request.request_id].usage
            assert usage is not None
            found.append(usage.cached_tokens)
        return found

    def chunks(self, request_id: str) -> list[Chunk]:
        return [chunk for plan in self.executor.plans for chunk in plan.chunks if chunk.request_id == request_id]

    def opened(self, request_id: str) -> list[SlotOpen]:
        """Return the starts of a request."""
        return [
            opened
            for plan in self.executor.plans
            for opened in plan.opens
            if any(chunk.request_id == request_id and chunk.slot == opened.slot for chunk in plan.chunks)
        ]

    def snapshots(self, request_id: str) -> list[int]:
        """Return the borders at which chunks of a request took snapshots."""
        return [
            chunk.state.snapshot_tokens
            for chunk in self.chunks(request_id)
            if chunk.state is not None and chunk.state.snapshot is not None
        ]


def request(name: str, prompt: Sequence[int], max_tokens: int = 6, **options: Any) -> EngineRequest:
    return make_request(name, prompt, max_tokens=max_tokens, **options)


def conversation(server: Server, num_turns: int = 10) -> tuple[list[int], list[int]]:
    """Serve the turns of a conversation; return how many tokens of each were cached, and how many could be."""
    tokens, found, most = list(range(7)), [], []
    border = 0
    for turn in range(num_turns):
        one = request(f"turn {turn}", tokens, max_tokens=5 + turn)
        found += server.cached(one)
        most.append(border)
        outputs = run_alone(one, server.capacity.max_model_len).token_ids
        border = (len(tokens) + len(outputs) - 1) // server.capacity.state_unit * server.capacity.state_unit
        tokens = [*tokens, *outputs, *(50 + turn + i for i in range(3 + turn % 3))]
    return found, most


def test_each_turn_of_a_conversation_finds_all_but_the_last_page_of_the_one_before() -> None:
    server = Server()
    found, most = conversation(server)
    assert found == most
    stats = server.scheduler.stats()
    assert (stats.state_snapshots_found, stats.state_recomputed_tokens) == (9, 0)
    assert (stats.num_states_used, stats.num_states) == (0, 12)


def test_conversations_with_drafts_find_their_turns() -> None:
    server = Server(max_drafts=5)
    found, most = conversation(server)
    # Of the last step, only the first token is certain, so the state may be a draft behind
    assert all(limit - 8 <= count <= limit for count, limit in zip(found, most))
    assert server.scheduler.stats().num_drafts > 0


def test_pages_longer_than_blocks_are_found_in_a_conversation_too() -> None:
    server = Server(page_size=8, block=2)
    found, most = conversation(server)
    assert found == most
    moves = [chunk for plan in server.executor.plans for chunk in plan.chunks[: plan.num_decodes] if chunk.state]
    assert moves, "running requests leave the row at a border of pages"
    assert all(chunk.state is not None and chunk.state.snapshot is None for chunk in moves)


def test_a_running_request_keeps_one_row_of_a_border_of_pages() -> None:
    server = Server(page_size=8, block=2)
    server.loop.add(request("a", PREFIX[:3], max_tokens=60))
    most = 0
    while server.loop.has_work:
        server.loop.step()
        most = max(most, server.scheduler.stats().num_state_snapshots)
    assert most == 1
    assert server.scheduler.stats().num_state_snapshots == 1


def test_of_two_rows_of_a_request_that_ends_the_last_one_becomes_a_snapshot() -> None:
    server = Server(page_size=8, block=2)
    one = request("a", PREFIX[:3], max_tokens=14)
    assert server.cached(one, request("b", [*PREFIX[:3], *run_alone(one, 512).token_ids])) == [0, 16]
    assert server.scheduler.stats().state_snapshots_taken == 1, "and none of the row at 8"


def test_a_border_that_has_a_snapshot_is_not_kept_again() -> None:
    server = Server(page_size=8, block=2)
    server.cached(request("a", PREFIX[:17]), request("b", [60]))
    assert server.snapshots("a") == [16]
    assert [chunk.state for name in "ab" for chunk in server.chunks(name)[1:]] == [None] * 10


def test_a_kept_row_is_given_up_for_a_request_that_starts() -> None:
    server = Server(page_size=8, block=2, states=4)
    running = [request(str(i), [i] * 3, max_tokens=40) for i in range(4)]
    for one in running[:2]:
        server.loop.add(one)
    while server.scheduler.stats().num_state_snapshots < 2:
        server.loop.step()
    for one in running[2:]:
        server.loop.add(one)
    server.loop.step()
    assert server.scheduler.num_running == 4


def test_the_row_that_a_request_leaves_is_not_given_away_in_the_same_plan() -> None:
    for num_steps in range(1, 14):
        server = Server(page_size=8, block=2, states=2, sizes={"num_slots": 2})
        server.loop.add(request("a", PREFIX[:3], max_tokens=30))
        for _ in range(num_steps):
            server.loop.step()
        server.serve(request("b", [60]))


def test_a_branching_point_is_found_by_the_third_request() -> None:
    server = Server()
    first, second, third = (request(name, [*PREFIX, 60 + i, *range(10)]) for i, name in enumerate("abc"))
    assert server.cached(first, second, third) == [0, 0, 20]
    assert server.scheduler.stats().state_recomputed_tokens == 20
    assert server.snapshots("a") == [28]
    assert server.snapshots("b") == [20, 28]
    [opened] = server.opened("b")
    assert (opened.state, opened.num_cached_tokens, len(opened.cached_pages[0])) == (None, 0, 5)


def test_a_chunk_ends_at_the_first_of_two_snapshots() -> None:
    server = Server()
    first, second = (request(name, [*PREFIX, 60 + i, *range(10)]) for i, name in enumerate("ab"))
    server.cached(first, second)
    prompt = [chunk for chunk in server.chunks("b") if chunk.tokens is not None]
    assert [(chunk.start, chunk.length) for chunk in prompt] == [(0, 20), (20, 11)]
    row = prompt[0].state.target if prompt[0].state else None
    assert [chunk.state and (chunk.state.target, chunk.state.snapshot_tokens) for chunk in prompt] == [
        (row, 20),
        (row, 28),
    ]


def test_no_other_prompt_begins_after_a_chunk_that_ends_at_a_snapshot() -> None:
    """Else two prompts of a rank would be partly planned, and might wait for each other's pages."""
    server = Server(chunked_prefill_size=16)
    first, second = (request(name, [*PREFIX, 60 + i, *range(10)]) for i, name in enumerate("ab"))
    server.cached(first)
    server.serve(second, request("c", [59] * 20))
    prompt = [chunk.length for chunk in server.chunks("b") if chunk.tokens is not None]
    assert prompt == [16, 4, 11]


def test_pages_that_a_request_has_already_are_no_limit_for_its_chunk() -> None:
    server = Server(sizes={"num_pages": 8})
    first, second = (request(name, [*PREFIX, 60 + i, *range(10)], max_tokens=1) for i, name in enumerate("ab"))
    server.cached(first, second)
    assert [chunk.length for chunk in server.chunks("b")] == [20, 11]


def test_the_first_chunk_reads_the_snapshot_and_names_the_row_of_the_request() -> None:
    server = Server()
    server.cached(request("a", PREFIX), request("b", [*PREFIX[:18], 60]))
    [opened] = server.opened("b")
    first, *others = server.chunks("b")
    assert first.state is not None
    assert opened.state not in (None, first.state.target)
    assert (opened.num_cached_tokens, first.start) == (16, 16)
    assert [chunk.state for chunk in others] == [None] * len(others)


def test_long_prompts_leave_snapshots_at_the_ends_of_chunks() -> None:
    server = Server(state_snapshot_interval=30, chunked_prefill_size=18)
    server.cached(request("a", list(range(60)) * 2))
    assert server.snapshots("a") == [36, 72, 108, 116]


def test_the_prompt_that_began_nothing_for_longest_is_evicted() -> None:
    server = Server(states=4, sizes={"num_slots": 1})
    prompts = [[60 + i] * 11 for i in range(3)]

    def lookup(prompt: list[int]) -> int:
        return server.scheduler._ranks[0].cache.match_length(("", False), prompt, len(prompt) - 1)

    server.cached(*(request(str(i), prompt, max_tokens=1) for i, prompt in enumerate(prompts)))
    assert [lookup(prompt) for prompt in prompts] == [8, 8, 8]
    server.cached(request("again", prompts[0], max_tokens=1))
    server.cached(request("d", [50] * 11, max_tokens=1))
    assert [lookup(prompt) for prompt in prompts] == [8, 0, 8]
    assert lookup([50] * 11) == 8


def test_samples_of_a_prompt_begin_with_its_snapshot() -> None:
    server = Server()
    samples = [request(f"s{i}", PREFIX * 2, group_id="g", sample=i, temperature=1.0, seed=i, n=3) for i in range(3)]
    server.serve(*samples)
    assert [opened.num_cached_tokens for plan in server.executor.plans for opened in plan.opens] == [0, 36, 36]


def test_requests_with_a_common_beginning_wait_for_the_one_that_takes_its_snapshot() -> None:
    server = Server()
    suffixes = [[60 + i, *range(20)] for i in range(3)]
    prefix = list(range(40))
    server.cached(request("first", [*prefix, *suffixes[0]]))
    server.serve(*(request(str(i), [*prefix, *suffix]) for i, suffix in enumerate(suffixes[1:])))
    assert [server.opened(str(i))[0].num_cached_tokens for i in range(2)] == [0, 40]


def test_prompts_that_arrive_together_share_the_snapshot_of_their_common_beginning() -> None:
    server = Server()
    prefix = list(range(41))
    server.serve(*(request(name, [*prefix, 60 + i, *range(10)]) for i, name in enumerate("abc")))
    assert [opened.num_cached_tokens for plan in server.executor.plans for opened in plan.opens] == [0, 40, 40]
    assert server.snapshots("a") == [40], "a chunk takes one snapshot"
    assert server.scheduler.stats().state_recomputed_tokens == 0


def test_log_probabilities_of_a_prompt_compute_it_from_the_beginning() -> None:
    server = Server()
    assert server.cached(request("a", PREFIX), request("b", PREFIX, prompt_logprobs=0)) == [0, 0]
    assert server.scheduler.stats().state_recomputed_tokens == 0


def test_pages_that_no_request_has_locked_get_no_snapshot() -> None:
    """They may be evicted for the same plan, which would give the row away while a step writes it."""
    server = Server()
    one = request("a", PREFIX)
    server.cached(one)
    states = server.scheduler._ranks[0].cache.states
    assert states is not None
    for node in descendants(server.scheduler._ranks[0].cache._roots["", False]):
        states.pool.drop(node)
    server.cached(request("b", PREFIX, prompt_logprobs=0), request("c", PREFIX))
    assert (server.snapshots("b"), server.snapshots("c")) == ([], [16])


def test_without_a_cache_no_snapshot_is_taken() -> None:
    server = Server(prefix_cache=False)
    assert server.cached(request("a", PREFIX), request("b", PREFIX)) == [0, 0]
    assert server.snapshots("a") == server.snapshots("b") == []
    stats = server.scheduler.stats()
    assert (stats.num_states_used, stats.num_state_snapshots) == (0, 0)


def test_a_request_that_is_preempted_goes_on_from_its_state() -> None:
    server = Server(policy="priority", sizes={"num_slots": 1})
    low, high = request("low", PREFIX, max_tokens=30), request("high", [60] * 9, priority=1)
    server.loop.add(low)
    for _ in range(10):
        server.loop.step()
    server.loop.add(high)
    server.finish()
    first, again = server.opened("low")
    assert first.state is None
    computed = max(chunk.start + chunk.length for chunk in server.chunks("low") if chunk.start < 29)
    assert again.num_cached_tokens == (len(low.prompt_ids) + len(again.output_ids) - 1) // 4 * 4 <= computed


def test_an_aborted_request_leaves_its_state() -> None:
    server = Server()
    one = request("a", PREFIX, max_tokens=100)
    server.loop.add(one)
    for _ in range(20):
        server.loop.step()
    server.loop.abort(["a"])
    num_outputs = len(server.chunks("a")) - 1
    server.finish()
    expected = run_alone(one, 512).token_ids
    [found] = server.cached(request("b", [*PREFIX, *expected[:num_outputs], 63]))
    assert found >= len(PREFIX) + num_outputs - 4


def test_forced_tokens_that_are_computed_together_are_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForcedRuns, "together", lambda *_: True)
    server = Server(grammars=small_grammars())
    one = msgspec.structs.replace(
        request("a", PREFIX, max_tokens=60), grammar=LLMatcher.grammar_from_regex("[a-c]{2}hellohello[a-c]{20}")
    )
    server.loop.add(one)
    for _ in range(1000):
        server.loop.step()
        if server.executor.plans and server.executor.plans[-1].num_forced:
            break
    [chunk] = server.executor.plans[-1].chunks
    assert chunk.length > 4
    server.loop.abort(["a"])
    server.finish()
    known = [*PREFIX, *run_alone(one, 512).token_ids[: chunk.start + chunk.length - len(PREFIX)]]
    assert server.cached(request("b", [*known, 60])) == [len(known) // 4 * 4]


def test_a_flush_leaves_running_requests_their_rows() -> None:
    server = Server()
    server.loop.add(request("a", PREFIX, max_tokens=30))
    server.loop.step()
    server.scheduler.flush_cache()
    assert server.scheduler.check_integrity() == []
    assert server.scheduler.stats().num_states_used == 1
    server.finish()
    assert server.scheduler.stats().num_states_used == 0


def test_snapshots_in_host_memory_are_found_after_others_took_their_rows() -> None:
    server = Server(states=1, sizes={"num_slots": 1}, num_host_pages=[64], num_host_states=8)
    one, other = request("a", PREFIX), request("b", [60] * 20)
    border = (len(PREFIX) + 6 - 1) // 4 * 4
    again = request("again", [*PREFIX, *run_alone(one, 512).token_ids, 1])
    assert server.cached(one, other, again) == [0, 0, border]
    assert [load[0] for load in server.executor.loads] == [1]


def test_one_row_for_each_slot_is_enough() -> None:
    server = Server(states=4)
    prompts = [[*PREFIX[: 4 * i], 60 + i, *range(8)] for i in range(12)]
    server.serve(*(request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts)))
    assert server.scheduler.num_running == 0


def _border(state: StateRow) -> int | None:
    return state.border(Capacity(**{**msgspec.structs.asdict(make_capacity()), "state_block": 16}))


def test_the_border_of_a_sequence_with_drafts() -> None:
    state = StateRow(0, 0, [])
    state.certain, state.unsure = 32, 0  # a step that verifies 4 drafts after 31 tokens
    assert _border(state) == 32
    state.commit_drafts(4, 0)
    assert _border(state) == 32, "the drafts of the last step were never certain"
    state.certain, state.unsure = 37, 4  # the next step is planned before those of the first one are known
    assert _border(state) == 32
    state.certain = 35
    assert _border(state) is None
    state.commit_drafts(4, 0)
    assert _border(state) == 16


class FourDrafts(AnyLengths):
    """Verifies drafts of four tokens in each step."""

    def choose(self, ranks: Sequence[Sequence[DraftedRequest]]) -> list[int] | None:
        return [4] * 16


def test_drafts_that_were_rejected_and_those_of_the_last_step_are_not_in_the_state() -> None:
    capacity = Server(block=1, page_size=1, max_drafts=4).capacity
    scheduler = make_scheduler(capacity=capacity, speculation=FourDrafts(capacity, random.Random(0)))
    scheduler.add(request("a", PREFIX[:8], max_tokens=100))
    prompt = planned(scheduler)
    scheduler.commit(prompt, answer(prompt))
    first, second = planned(scheduler), planned(scheduler)
    scheduler.commit(first, StepResult(tokens=[[1]], logprobs={}, prompt_logprobs={}, drafts=[(1, 0)]))
    scheduler.commit(second, StepResult(tokens=[[1] * 5], logprobs={}, prompt_logprobs={}, drafts=[(4, 4)]))
    scheduler.abort("a")
    assert scheduler.check_integrity() == []
    known = [*PREFIX[:8], *[1] * 7]
    found = scheduler._ranks[0].cache.match_length(("", False), known, len(known))
    assert found == 10, "8 of the prompt, 1 of the first step, and the first one of the second step"


def test_models_without_states_plan_none() -> None:
    scheduler = make_scheduler()
    executor = FakeExecutor(scheduler._capacity)
    loop = EngineLoop(scheduler, executor, overlap=True)
    loop.add(request("a", PREFIX))
    while loop.has_work:
        loop.step()
    writes: list[StateWrite | None] = [chunk.state for plan in executor.plans for chunk in plan.chunks]
    assert writes == [None] * len(writes)
    assert scheduler.stats().num_states == 0


def test_a_prompt_is_found_by_a_turn_that_repeats_all_but_its_last_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_states, "NOT_REPEATED", 4)
    server, prompt = Server(block=16, page_size=16), list(range(34))
    next_turn = [*prompt[:30], *range(100, 120)]
    assert server.cached(make_request("first", prompt), make_request("next", next_turn)) == [0, 16]
    assert server.snapshots("first") == [16]
    short = Server(block=16, page_size=16)
    assert short.cached(make_request("a", prompt[:18]), make_request("b", prompt[:18])) == [0, 16]
