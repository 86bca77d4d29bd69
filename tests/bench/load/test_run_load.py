"""Loads against the known server."""

from __future__ import annotations

import asyncio

import pytest

from jaxserve.bench.datasets.prompts import BenchConversation, DatasetPrompt, single_prompt
from jaxserve.bench.load.run_load import LoadRun, count_answer_tokens
from tests.bench.conftest import Harness

pytestmark = pytest.mark.process


def prompts(count: int, tokens: int = 3) -> list[BenchConversation]:
    return [single_prompt(f"prompt {i}", None, tokens) for i in range(count)]


async def test_all_are_sent_and_recorded_in_order(harness: Harness) -> None:
    load = LoadRun(harness.client(), prompts(5), [0.0] * 5, id_prefix="x-")
    run = await load.run(asyncio.Event())
    assert [(record.id, record.status) for record in run.records] == [(f"x-{i}", "ok") for i in range(5)]
    assert not run.interrupted
    assert max(record.end for record in run.records) <= run.start + run.duration
    assert [harness.server.bodies[i]["prompt"] for i in range(5)] == [f"prompt {i}" for i in range(5)]


@pytest.mark.parametrize("most", [1, 3])
async def test_no_more_are_open_than_allowed(harness: Harness, most: int) -> None:
    load = LoadRun(harness.client(itl=0.005), prompts(8), [0.0] * 8, max_concurrency=most)
    run = await load.run(asyncio.Event())
    assert harness.server.most_open == most
    assert harness.server.connections == most
    # Latency starts when a request is sent, after the wait for its turn.
    last = run.records[-1]
    assert last.start - run.start == pytest.approx(last.queued, abs=0.5 * last.queued)
    assert (last.ttft or 0) < last.queued


async def test_requests_are_sent_at_their_times(harness: Harness) -> None:
    times = [0.0, 0.1, 0.3]
    run = await LoadRun(harness.client(), prompts(3), times).run(asyncio.Event())
    sent = [record.start - run.start for record in run.records]
    assert all(when >= due for when, due in zip(sent, times))
    assert sent[2] - sent[1] > sent[1] - sent[0] > 0


async def test_each_request_has_its_own_seed_if_requested(harness: Harness) -> None:
    await LoadRun(harness.client(), prompts(3), [0.0] * 3, max_concurrency=1, seed=40).run(asyncio.Event())
    await LoadRun(harness.client(), prompts(1), [0.0]).run(asyncio.Event())
    assert [body.get("seed") for body in harness.server.bodies] == [40, 41, 42, None]


@pytest.mark.parametrize("chat", [True, False])
async def test_a_turn_is_sent_with_the_turns_before_it(harness: Harness, chat: bool) -> None:
    conversation = BenchConversation(
        (DatasetPrompt("first", None, 2), DatasetPrompt("second", None, 1)), system="be brief"
    )
    run = await LoadRun(harness.client(chat=chat), [conversation], [0.0]).run(asyncio.Event())
    assert [record.status for record in run.records] == ["ok", "ok"]
    assert run.records[1].start >= run.records[0].end
    second = harness.server.bodies[1]
    if chat:
        assert second["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": " one two"},
            {"role": "user", "content": "second"},
        ]
    else:
        assert second["prompt"] == "be brief\nfirst\n one two\nsecond"


async def test_turns_after_a_failure_are_not_sent(harness: Harness) -> None:
    conversation = BenchConversation(tuple(DatasetPrompt("hi", None, 5) for _ in range(3)))
    run = await LoadRun(harness.client(fault="close"), [conversation], [0.0]).run(asyncio.Event())
    assert [record.status for record in run.records] == ["failed"] * 3
    assert run.records[2].error == "not sent: an earlier turn of its conversation failed"
    assert len(harness.server.bodies) == 1


async def test_a_stopped_run_keeps_its_measurements(harness: Harness) -> None:
    stop = asyncio.Event()
    conversations = [*prompts(2, tokens=1), *prompts(2, tokens=10_000), single_prompt("late", None, 1)]
    load = LoadRun(harness.client(itl=0.001), conversations, [0.0, 0.0, 0.0, 0.0, 1e6])
    running = asyncio.create_task(load.run(stop))
    while not (load.records[0].status == load.records[1].status == "ok" and load.records[3].token_times):
        await asyncio.sleep(0)
    stop.set()
    run = await running
    assert run.interrupted
    assert [record.status for record in run.records] == ["ok", "ok", "unfinished", "unfinished", "unfinished"]
    assert run.records[4].error == "not sent before the run was ended"
    assert load.open == 0


async def test_answers_without_usage_are_counted_by_their_text(harness: Harness) -> None:
    run = await LoadRun(harness.client(usage=False, tokens_a_chunk=2), prompts(1, tokens=5), [0.0]).run(asyncio.Event())
    assert run.records[0].output_tokens == 3
    count_answer_tokens(run.records, lambda text: len(text.split()))
    assert (run.records[0].output_tokens, run.records[0].counted_by) == (5, "tokenizer")


async def test_a_blocked_loop_is_detected(harness: Harness) -> None:
    load = LoadRun(harness.client(itl=0.01), prompts(1, tokens=30), [0.0])
    running = asyncio.create_task(load.run(asyncio.Event()))
    while not load.records[0].token_times:
        await asyncio.sleep(0)
    while not running.done():
        sum(range(2_000_000))
        await asyncio.sleep(0)
    client = running.result().client
    assert client.bottleneck
    assert client.late_ms_p99 > 10
