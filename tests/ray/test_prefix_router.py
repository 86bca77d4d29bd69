"""Serve's router of ours over replicas that are only names, sizes and queues."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from jaxserve.ray import CachedPrefixRouter
from jaxserve.ray.forwarding import ForwardedRequest

DEPLOYMENT = DeploymentID("engine", "llm")
PROMPTS = [letter * 1024 for letter in "abcdefgh"]


class Replica:
    """What a router sees of a replica."""

    def __init__(self, name: str, **stats: int) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats: dict[str, Any] = stats
        self.multiplexed_model_ids: set[str] = set()
        self.node_id, self.availability_zone = "node", None
        self.max_ongoing_requests = 10_000

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Router:
    """The router with its replicas; it sends requests as Serve does."""

    def __init__(self, *replicas: Replica) -> None:
        self._numbers = itertools.count()
        self.router = CachedPrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        self.router.initialize_state()
        self.set(*replicas)

    def set(self, *replicas: Replica) -> None:
        self.replicas = list(replicas)
        self.router.update_replicas(self.replicas)  # type: ignore[arg-type]

    def pending(self, prompt: str, tried: Iterable[str] = ()) -> PendingRequest:
        request = ForwardedRequest("POST", "/", b"", [], b"", prompt=prompt, tried=frozenset(tried))
        name = str(next(self._numbers))
        return PendingRequest([request], {}, RequestMetadata(name, name))

    async def ranks(self, pending: PendingRequest) -> list[str]:
        """Choose, and return the names of the replicas from best to worst."""
        ranks = await self.router.choose_replicas(list(self.replicas), pending)  # type: ignore[arg-type]
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]

    async def send(self, prompt: str, tried: Iterable[str] = ()) -> tuple[str, str]:
        """Send a request and return the names of its replica and of itself."""
        pending = self.pending(prompt, tried)
        [name, *_] = await self.ranks(pending)
        self.router.on_request_routed(pending, ReplicaID(name, DEPLOYMENT), None)
        return name, pending.metadata.internal_request_id

    async def serve(self, prompt: str) -> str:
        """Send a request that ends before the next one."""
        name, request_id = await self.send(prompt)
        self.router.on_request_completed(ReplicaID(name, DEPLOYMENT), request_id)
        return name


@pytest.fixture
async def two() -> Router:
    return Router(Replica("a"), Replica("b"))


async def test_a_prefix_goes_where_it_was_sent_and_others_spread(two: Router) -> None:
    places = {prompt: await two.serve(prompt) for prompt in PROMPTS}
    assert Counter(places.values()) == {"a": 4, "b": 4}
    for prompt in reversed(PROMPTS):
        assert await two.serve(f"{prompt}, and more that differs") == places[prompt]


async def test_a_prefix_that_is_longer_at_another_replica_goes_there(two: Router) -> None:
    first = await two.serve("a" * 640)
    other = "b" if first == "a" else "a"
    held = [await two.send(prompt) for prompt in PROMPTS[1:]]
    for name, request_id in held:
        two.router.on_request_completed(ReplicaID(name, DEPLOYMENT), request_id)
    pending = two.pending("a" * 1280)
    two.router.on_request_routed(pending, ReplicaID(other, DEPLOYMENT), None)
    two.router.on_request_completed(ReplicaID(other, DEPLOYMENT), pending.metadata.internal_request_id)
    assert await two.serve("a" * 1280) == other


async def test_a_burst_of_equal_prompts_is_shared_beyond_the_crowded_share() -> None:
    router = Router(Replica("a", slots=16), Replica("b", slots=16))
    sent = [(await router.send(PROMPTS[0]))[0] for _ in range(16)]
    assert len(set(sent[:9])) == 1, "half of the slots, and one more"
    assert sent[9] != sent[0]
    assert Counter(sent) == {"a": 9, "b": 7}, "then both have the prefix"


async def test_a_full_replica_gets_nothing_while_another_has_slots() -> None:
    router = Router(Replica("a", slots=2), Replica("b", slots=100))
    sent = Counter([(await router.send(PROMPTS[0]))[0] for _ in range(40)])
    assert sent["a"] <= 2
    assert sent["b"] >= 38


async def test_replicas_that_refused_a_request_come_last(two: Router) -> None:
    first = await two.serve(PROMPTS[0])
    other = "b" if first == "a" else "a"
    assert await two.ranks(two.pending(PROMPTS[0])) == [first, other]
    assert await two.ranks(two.pending(PROMPTS[0], tried={first})) == [other, first]
    assert sorted(await two.ranks(two.pending(PROMPTS[0], tried={"a", "b"}))) == ["a", "b"]


async def test_a_new_replica_gets_what_is_new_and_a_removed_one_nothing(two: Router) -> None:
    held = [await two.send(prompt) for prompt in PROMPTS]
    a, b = two.replicas
    two.set(a, b, c := Replica("c"))
    assert [(await two.send(f"new {prompt}"))[0] for prompt in PROMPTS[:3]] == ["c"] * 3
    two.set(b, c)
    places = [await two.serve(prompt) for prompt in PROMPTS]
    assert set(places) == {"b", "c"}
    for (name, request_id), place in zip(held, places):
        assert name == "a" or name == place
        two.router.on_request_completed(ReplicaID(name, DEPLOYMENT), request_id)
    two.set(a, b, c)
    assert await two.ranks(two.pending("z" * 1024))


async def test_a_replica_between_candidates_and_statistics_is_left_out(two: Router) -> None:
    two.replicas = [*two.replicas, Replica("unknown")]
    assert sorted(await two.ranks(two.pending(PROMPTS[0]))) == ["a", "b"]
    two.replicas = []
    assert await two.ranks(two.pending(PROMPTS[0])) == []


async def test_open_requests_count_until_they_end(two: Router) -> None:
    first, request_id = await two.send("")
    other, _ = await two.send("")
    assert {first, other} == {"a", "b"}
    two.router.on_request_completed(ReplicaID(first, DEPLOYMENT), request_id)
    assert [await two.serve("") for _ in range(3)] == [first] * 3
    two.router.on_request_completed(None, "unknown")


async def test_a_request_that_was_chosen_for_counts_before_it_is_sent_and_until_it_is_cancelled(two: Router) -> None:
    first = two.pending("")
    [best, other] = await two.ranks(first)
    assert await two.ranks(two.pending("")) == [other, best]
    assert (await two.ranks(first))[0] == best, "choosing again for the same request counts it once"
    first.future.cancel()
    assert (await two.ranks(two.pending("")))[0] == best


async def test_a_request_counts_where_it_was_sent_though_another_replica_was_best(two: Router) -> None:
    pending = two.pending("")
    [best, other] = await two.ranks(pending)
    two.router.on_request_routed(pending, ReplicaID(other, DEPLOYMENT), None)
    assert (await two.send(""))[0] == best
    two.router.on_request_routed(pending, ReplicaID("gone", DEPLOYMENT), None)


async def test_without_a_cache_prefixes_have_no_place() -> None:
    router = Router(Replica("a", cache_tokens=0), Replica("b", cache_tokens=0))
    assert (await router.send(PROMPTS[0]))[0] != (await router.send(PROMPTS[0]))[0]


async def test_a_small_cache_forgets_what_it_had_longest() -> None:
    router = Router(Replica("a", cache_tokens=512), Replica("b", cache_tokens=512))
    places = [await router.serve(prompt) for prompt in PROMPTS]
    assert len(set(places)) == 2
    for load in router.router._loads.values():
        assert len(load.index) == 512 // 16


async def test_calls_other_than_requests_are_sent_anywhere(two: Router) -> None:
    metadata = RequestMetadata("x", "x")
    assert sorted(await two.ranks(PendingRequest([], {}, metadata))) == ["a", "b"]
    assert sorted(await two.ranks(PendingRequest(["a", b"question"], {}, metadata))) == ["a", "b"]
    [[*both]] = await two.router.choose_replicas(list(two.replicas), None)  # type: ignore[arg-type]
    assert both == two.replicas
