"""Chooses the replica for each request: the one that has its prefix cached, unless others are much less busy.

It costs replicas as `--dp-mode replicas` does, with texts in place of tokens: it knows no tokenizer. A router belongs
to one process of Serve's that sends requests, knows what that process has sent, and asks the replicas for nothing but
their sizes, which come with Serve's statistics. A wrong estimate may cost speed, never correctness.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxserve.engine.client import PrefixIndex, ReplicaCost, replica_cost
from jaxserve.ray.forwarding import ForwardedRequest

# About the bytes of a page of 16 tokens.
_BLOCK = 64
_TOKENS_PER_BLOCK = 16
# Twice that of `--dp-mode replicas`: with few slots, prefixes that come together would else be computed twice
# (`benchmarks/ray_serve.py`).
_CROWDED_SHARE = 0.5
# Until a replica has said what it has.
_SLOTS, _CACHED_TOKENS = 256, 2**20


@dataclasses.dataclass(frozen=True)
class _RoutedRequest:
    request: PendingRequest
    prompt_tokens: int

    @property
    def pending_tokens(self) -> int:
        """The prompt tokens to compute, until the answer begins."""
        return 0 if _request_of(self.request).progress.has_begun else self.prompt_tokens


@dataclasses.dataclass
class _RoutedLoad:
    """A replica: what this process has sent to it, its open requests by their ids, and its number of slots."""

    index: PrefixIndex
    num_slots: int = _SLOTS
    open: dict[str, _RoutedRequest] = dataclasses.field(default_factory=dict)


class CachedPrefixRouter(RequestRouter):
    """Serve's router over the replicas of one deployment.

    It runs on one event loop, but Serve reports ends of requests from any thread.
    """

    def initialize_state(self, **arguments: Any) -> None:
        """Begin without any replica. There are no arguments."""
        self._loads: dict[ReplicaID, _RoutedLoad] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take these replicas from now on, with their last statistics."""
        super().update_replicas(replicas)
        found = {}
        for replica in replicas:
            stats: Mapping[str, Any] = replica.routing_stats or {}
            load = self._loads.get(replica.replica_id) or _RoutedLoad(PrefixIndex(_CACHED_TOKENS // _TOKENS_PER_BLOCK))
            load.num_slots = int(stats.get("slots", load.num_slots))
            if (cached_tokens := stats.get("cache_tokens")) is not None:
                load.index.resize(int(cached_tokens) // _TOKENS_PER_BLOCK)
            found[replica.replica_id] = load
        self._loads = found

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas from best to worst, each a rank of its own. The request counts at the best at once, since
        others are chosen for before this one is sent."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request = _request_of(pending_request)
        names = block_names(request.prompt)
        self.on_request_completed(None, pending_request.metadata.internal_request_id)
        known = [replica for replica in candidate_replicas if replica.replica_id in self._loads]
        num_open = {replica.replica_id: self._num_open(replica.replica_id) for replica in known}
        fewest = min(num_open.values(), default=0)

        def cost(replica: RunningReplica) -> tuple[bool, ReplicaCost]:
            load = self._loads[replica.replica_id]
            return (
                replica.replica_id.unique_id in request.tried,
                replica_cost(
                    num_open=num_open[replica.replica_id],
                    fewest_open=fewest,
                    num_slots=load.num_slots,
                    pending_tokens=sum(one.pending_tokens for one in list(load.open.values())),
                    cached_tokens=load.index.match(names) * _TOKENS_PER_BLOCK,
                    num_pages=len(load.index),
                    crowded_share=_CROWDED_SHARE,
                ),
            )

        ranked = sorted(known, key=cost)
        if ranked:
            self._count(pending_request, names, ranked[0].replica_id)
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request at another replica than the best, if it was sent there."""
        request_id = pending_request.metadata.internal_request_id
        if (load := self._loads.get(replica_id)) is not None and request_id not in load.open:
            self.on_request_completed(None, request_id)
            self._count(pending_request, block_names(_request_of(pending_request).prompt), replica_id)

    def on_request_completed(self, replica_id: ReplicaID | None, internal_request_id: str) -> None:
        """Stop counting a request at a replica, or at all."""
        for known, load in list(self._loads.items()):
            if replica_id is None or known == replica_id:
                load.open.pop(internal_request_id, None)

    def _count(self, pending_request: PendingRequest, names: list[int], replica_id: ReplicaID) -> None:
        load = self._loads[replica_id]
        missing = (len(names) - load.index.match(names)) * _TOKENS_PER_BLOCK
        load.open[pending_request.metadata.internal_request_id] = _RoutedRequest(pending_request, missing)
        load.index.add(names)

    def _num_open(self, replica_id: ReplicaID) -> int:
        """Return how many requests of this process a replica has open."""
        load = self._loads[replica_id]
        for request_id, routed in list(load.open.items()):
            if routed.request.future.cancelled():  # the client has gone before it was sent, so that no end is reported
                load.open.pop(request_id, None)
        return len(load.open)


def block_names(text: str) -> list[int]:
    """Return a name for each whole block of a text, which depends on all of the text up to the block's end."""
    raw = text.encode("utf-8", "replace")
    names: list[int] = []
    name = 0
    for end in range(_BLOCK, len(raw) + 1, _BLOCK):
        name = hash((name, raw[end - _BLOCK : end]))
        names.append(name)
    return names


def _request_of(pending_request: PendingRequest) -> ForwardedRequest:
    """Return the request that the ingress forwards, or one without a prompt for any other call of a replica."""
    first = pending_request.args[0] if pending_request.args else None
    return first if isinstance(first, ForwardedRequest) else ForwardedRequest("", "", b"", [], b"")
