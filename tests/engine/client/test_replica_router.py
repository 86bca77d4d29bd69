from __future__ import annotations

import random
from typing import Any

from jaxserve.api_types import FinishReason, TokenEvent, Usage
from jaxserve.engine.client.replica_router import ReplicaPlacement
from tests.engine.conftest import make_request

PAGE = 4


def placement(num_replicas: int = 2, **sizes: Any) -> ReplicaPlacement:
    return ReplicaPlacement(num_replicas, **{"num_slots": 64, "num_pages": 1000, "page_size": PAGE, **sizes})


def first(name: str) -> TokenEvent:
    return TokenEvent(name, [1], queue_seconds=0.0)


def last(name: str, *, outputs: int = 1) -> TokenEvent:
    return TokenEvent(name, [1], FinishReason.STOP, usage=Usage(4, outputs))


def test_what_shares_no_prefix_is_spread() -> None:
    placed = placement(4)
    assert sorted(placed.place(make_request(f"r{i}", 40)) for i in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert placed.num_open == 8


def test_one_after_the_other_they_fill_all_caches() -> None:
    placed = placement(3)
    where = []
    for i in range(6):
        where.append(placed.place(make_request(f"r{i}", 40)))
        placed.watch(last(f"r{i}"))
    assert where == [0, 1, 2, 0, 1, 2]
    assert placed.num_open == 0


def test_a_request_goes_where_its_prefix_is() -> None:
    placed = placement()
    shared = list(range(200))
    home = placed.place(make_request("a", shared))
    placed.watch(last("a"))
    for i in range(4):
        assert placed.place(make_request(f"other{i}", 4)) is not None
    assert placed.place(make_request("b", [*shared, 7, 8])) == home
    # In another namespace nobody has it, so that it goes where there is less to do.
    assert placed.place(make_request("c", shared, namespace="salt")) != home


def test_samples_of_a_long_prompt_stay_together_and_of_a_short_one_do_not() -> None:
    for length, at_once in ((1000, 1), (8, 2)):
        placed = placement()
        prompt = list(range(length))
        assert len({placed.place(make_request(f"s{i}", prompt)) for i in range(4)}) == at_once


def test_a_prompt_that_is_ahead_counts_until_it_begins() -> None:
    placed = placement()
    long = placed.place(make_request("long", 2000))
    others = [placed.place(make_request(f"r{i}", 4)) for i in range(6)]
    assert set(others) == {1 - long}
    placed.watch(first("long"))
    assert placed.place(make_request("later", 4)) == long


def test_where_slots_are_free_is_better_than_any_prefix() -> None:
    placed = placement(num_slots=2)
    shared = list(range(400))
    home = placed.place(make_request("a", shared))
    away = placed.place(make_request("b", 4))
    assert away != home
    assert placed.place(make_request("c", shared)) == home
    assert placed.place(make_request("d", shared)) == away
    assert placed.place(make_request("e", shared)) in (home, away), "when all are full they queue where it costs least"


def test_a_prefix_that_all_share_does_not_draw_all_to_one() -> None:
    placed = placement(4)
    shared = list(range(4000))
    where = [placed.place(make_request(f"r{i}", [*shared, i])) for i in range(100)]
    assert len(set(where[:16])) == 1
    counts = [where.count(replica) for replica in range(4)]
    assert max(counts) - min(counts) <= 17


def test_prompts_that_are_scored_find_nothing() -> None:
    placed = placement()
    shared = list(range(400))
    home = placed.place(make_request("a", shared))
    assert placed.place(make_request("b", shared, prompt_logprobs=0)) != home


def test_a_flush_forgets_the_prefixes_but_no_request() -> None:
    placed = placement()
    shared = list(range(400))
    home = placed.place(make_request("a", shared))
    placed.forget()
    assert placed.replica_of("a") == home
    assert placed.place(make_request("b", shared)) != home


def test_the_books_come_out_even() -> None:
    placed, rng, open_names = placement(3, num_slots=4, num_pages=40), random.Random(0), []
    begun: set[str] = set()
    for i in range(2000):
        if rng.random() < 0.5 or not open_names:
            placed.place(make_request(f"r{i}", [rng.randrange(3)] * rng.randrange(1, 60)))
            open_names.append(f"r{i}")
        elif rng.random() < 0.5:
            begun.add(name := rng.choice(open_names))
            placed.watch(first(name))
        else:
            open_names.remove(name := rng.choice(open_names))
            placed.watch(last(name, outputs=rng.randrange(30)))
            assert placed.replica_of(name) is None
        assert placed.num_open == len(open_names)
    for name in open_names:
        placed.watch(last(name))
    placed.watch(last("nobody"))
    assert [(load.num_open, load.pending_tokens) for load in placed._loads] == [(0, 0)] * 3
    assert all(len(load.index) <= 40 for load in placed._loads)
