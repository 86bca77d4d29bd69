from __future__ import annotations

import random
from typing import Any

from jaxserve.api_types import FinishReason, TokenEvent, Usage
from jaxserve.engine.client.placements import PlacementUpdate
from jaxserve.engine.client.replica_router import ReplicaRouter
from tests.engine.conftest import make_request

PAGE = 4


def make_router(num_replicas: int = 2, **sizes: Any) -> ReplicaRouter:
    return ReplicaRouter(num_replicas, **{"num_slots": 64, "num_pages": 1000, "page_size": PAGE, **sizes})


def first(name: str) -> TokenEvent:
    return TokenEvent(name, [1], queue_seconds=0.0)


def last(name: str, *, outputs: int = 1) -> TokenEvent:
    return TokenEvent(name, [1], FinishReason.STOP, usage=Usage(4, outputs))


def test_requests_without_a_common_prefix_are_spread() -> None:
    router = make_router(4)
    assert sorted(router.place(make_request(f"r{i}", 40)) for i in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert router.num_open == 8


def test_sequential_requests_fill_all_caches() -> None:
    router = make_router(3)
    where = []
    for i in range(6):
        where.append(router.place(make_request(f"r{i}", 40)))
        router.observe(last(f"r{i}"))
    assert where == [0, 1, 2, 0, 1, 2]
    assert router.num_open == 0


def test_a_request_goes_where_its_prefix_is() -> None:
    router = make_router()
    shared = list(range(200))
    home = router.place(make_request("a", shared))
    router.observe(last("a"))
    for i in range(4):
        assert router.place(make_request(f"other{i}", 4)) is not None
    assert router.place(make_request("b", [*shared, 7, 8])) == home
    # No replica has it in another namespace, so the less loaded one gets it.
    assert router.place(make_request("c", shared, namespace="salt")) != home


def test_routers_that_inform_each_other_choose_as_one() -> None:
    routers: list[ReplicaRouter] = []
    for index in range(2):
        other = 1 - index

        def send(update: PlacementUpdate, index: int = index, other: int = other) -> None:
            routers[other].apply(update, index)

        routers.append(make_router(send_update=send))
    one, two = routers
    shared = list(range(200))
    home = one.place(make_request("a", shared))
    one.observe(last("a", outputs=40))
    assert two.place(make_request("b", [*shared, 7])) == home, "the other one knows where the prefix is"
    assert one.num_open == two.num_open == 1
    assert one.place(make_request("c", 40)) != home, "and that the replica is busy"
    two.observe(first("b"))
    two.forget(0)
    assert (one.num_open, two.num_open) == (2, 1), "only what the ended process placed is forgotten"
    one.clear_caches()
    two.observe(last("b"))
    assert [len(load.index) for router in routers for load in router._loads] == [0] * 4


def test_samples_of_a_long_prompt_stay_together_and_of_a_short_one_do_not() -> None:
    for length, at_once in ((1000, 1), (8, 2)):
        router = make_router()
        prompt = list(range(length))
        assert len({router.place(make_request(f"s{i}", prompt)) for i in range(4)}) == at_once


def test_a_waiting_prompt_counts_until_its_first_token() -> None:
    router = make_router()
    long = router.place(make_request("long", 2000))
    others = [router.place(make_request(f"r{i}", 4)) for i in range(6)]
    assert set(others) == {1 - long}
    router.observe(first("long"))
    assert router.place(make_request("later", 4)) == long


def test_free_slots_are_preferred_to_any_prefix() -> None:
    router = make_router(num_slots=2)
    shared = list(range(400))
    home = router.place(make_request("a", shared))
    away = router.place(make_request("b", 4))
    assert away != home
    assert router.place(make_request("c", shared)) == home
    assert router.place(make_request("d", shared)) == away
    assert router.place(make_request("e", shared)) in (home, away), "when all are full, it waits where it costs least"


def test_a_common_prefix_does_not_draw_all_requests_to_one_replica() -> None:
    router = make_router(4)
    shared = list(range(4000))
    where = [router.place(make_request(f"r{i}", [*shared, i])) for i in range(100)]
    assert len(set(where[:16])) == 1
    counts = [where.count(replica) for replica in range(4)]
    assert max(counts) - min(counts) <= 17


def test_prompts_with_logprobs_use_no_cached_prefix() -> None:
    router = make_router()
    shared = list(range(400))
    home = router.place(make_request("a", shared))
    assert router.place(make_request("b", shared, prompt_logprobs=0)) != home


def test_a_flush_forgets_the_prefixes_but_no_request() -> None:
    router = make_router()
    shared = list(range(400))
    home = router.place(make_request("a", shared))
    router.clear_caches()
    assert router.replica_of("a") == home
    assert router.place(make_request("b", shared)) != home


def test_counts_return_to_zero_when_all_requests_have_ended() -> None:
    router, rng, open_names = make_router(3, num_slots=4, num_pages=40), random.Random(0), []
    begun: set[str] = set()
    for i in range(2000):
        if rng.random() < 0.5 or not open_names:
            router.place(make_request(f"r{i}", [rng.randrange(3)] * rng.randrange(1, 60)))
            open_names.append(f"r{i}")
        elif rng.random() < 0.5:
            begun.add(name := rng.choice(open_names))
            router.observe(first(name))
        else:
            open_names.remove(name := rng.choice(open_names))
            router.observe(last(name, outputs=rng.randrange(30)))
            assert router.replica_of(name) is None
        assert router.num_open == len(open_names)
    for name in open_names:
        router.observe(last(name))
    router.observe(last("nobody"))
    assert [(load.num_open, load.pending_tokens) for load in router._loads] == [(0, 0)] * 3
    assert all(len(load.index) <= 40 for load in router._loads)
