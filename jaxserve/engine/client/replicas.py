"""Several engines behind the interface of one, each in its own process and on its own devices: `--dp-mode replicas`.

It sends each request to a replica, and combines the replicas' descriptions, readings and health. If a replica ends
unexpectedly, all open requests fail and the service ends, as with a single engine. `EngineClient` talks to each engine
process. This module belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, ProfileInfo, ReplicaStats
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.aggregate import merge_info, merge_stats, replica_name
from jaxserve.engine.client.async_client import EngineClient
from jaxserve.engine.client.engine_processes import EngineProcesses
from jaxserve.engine.client.placements import PlacementBroadcast, PlacementUpdate
from jaxserve.engine.client.replica_router import ReplicaRouter
from jaxserve.engine.client.stream import RequestStream
from jaxserve.engine.process.launch_protocol import EngineEndpoint
from jaxserve.engine.scheduling.admission import QueueGate, QueueLimits
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError

# A replica that is ready answers at once, but a machine may be slow.
_FIRST_READING_TIMEOUT = 60.0
_UPDATES = msgspec.msgpack.Decoder(PlacementUpdate)


class Replicas:
    """Several equal engines as one. `attach` makes one, `shutdown` ends it.

    `on_death` resolves with the reason when an engine ends unexpectedly.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        config: EngineConfig,
        processes: EngineProcesses | None = None,
        broadcast: PlacementBroadcast | None = None,
    ) -> None:
        info, stats = engines[0].info, engines[0].stats
        self._engines = tuple(engines)
        self._processes = processes
        self._broadcast = broadcast
        self._router = ReplicaRouter(
            len(engines),
            num_slots=info.max_running_requests,
            num_pages=0 if config.disable_radix_cache else info.num_pages + stats.num_host_pages,
            page_size=info.page_size,
            send_update=None if broadcast is None else self._send_update,
        )
        self._gate = QueueGate(QueueLimits.of(config))
        # Another API process must not draw the same seeds.
        self._random = random.Random(config.random_seed if broadcast is None else None)
        self._dead: str | None = None
        self.info = merge_info([engine.info for engine in engines])
        self.on_death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if processes is not None:
            processes.on_death.add_done_callback(lambda death: self.end(death.result()))
        if broadcast is not None:
            broadcast.listener = self

    @classmethod
    async def attach(
        cls,
        endpoints: Sequence[EngineEndpoint],
        config: EngineConfig,
        *,
        client: int = 0,
        processes: EngineProcesses | None = None,
        broadcast: PlacementBroadcast | None = None,
    ) -> Replicas:
        """Make a client of running engines and wait for their first readings. The arguments are `EngineClient`'s;
        `broadcast` leads to the other API processes. Raise the errors of `refresh_stats`."""
        engines = [EngineClient(endpoint, config, client=client) for endpoint in endpoints]
        try:
            await asyncio.gather(*(engine.refresh_stats(_FIRST_READING_TIMEOUT) for engine in engines))
        except BaseException:
            for engine in engines:
                await engine.shutdown()
            raise
        return cls(engines, config, processes, broadcast)

    @property
    def stats(self) -> EngineStats:
        """The merged last readings of all replicas."""
        return merge_stats([engine.stats for engine in self._engines])

    @property
    def replicas(self) -> tuple[ReplicaStats, ...]:
        """Each engine process and its last reading."""
        return tuple(ReplicaStats(engine.pid, engine.stats) for engine in self._engines)

    @property
    def health(self) -> str | None:
        """None while every replica makes progress or is idle, else the problem of the first unhealthy one."""
        if self._dead is not None:
            return self._dead
        for number, engine in enumerate(self._engines):
            if engine.health is not None:
                return f"{replica_name(number)}: {engine.health}"
        return None

    def submit(self, request: EngineRequest) -> RequestStream:
        """Submit a request to a replica, with the errors of `EngineClient.submit`. The choice affects only speed."""
        [stream] = self.submit_all([request])
        return stream

    def submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """Submit several requests, with one message to each chosen replica. Raise the errors of `submit`."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        names: set[str] = set()
        for request in requests:
            if request.request_id in names or self._router.replica_of(request.request_id) is not None:
                raise InvalidRequestError(
                    f"a request with the id {request.request_id!r} is open already", param="request_id"
                )
            names.add(request.request_id)
        streams: dict[str, RequestStream] = {}
        chosen: dict[int, list[EngineRequest]] = {}
        for request in requests:
            if reason := self._queue_full_reason(request):
                stream = streams[request.request_id] = RequestStream(request, self.abort)
                stream.fail(reason)
            else:
                chosen.setdefault(self._router.place(request), []).append(self._with_seed(request))
        try:
            for number, own in chosen.items():
                for stream in self._engines[number].submit_all(own, self._router.observe):
                    streams[stream.request_id] = stream
        except JaxserveError:
            self.abort(streams)
            for request in requests:
                if request.request_id not in streams:
                    self._router.remove(request.request_id)
            raise
        return [streams[request.request_id] for request in requests]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask the engines to end requests, as `EngineClient.abort`."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            number = self._router.replica_of(request_id)
            if number is not None:
                by_replica.setdefault(number, []).append(request_id)
        for number, own in by_replica.items():
            self._engines[number].abort(own)

    async def refresh_stats(self, timeout: float = 5.0) -> EngineStats:
        """Request readings of all replicas and merge them. Raise `EngineClient.refresh_stats`'s errors if one fails."""
        return merge_stats(await asyncio.gather(*(engine.refresh_stats(timeout) for engine in self._engines)))

    async def flush_cache(self, timeout: float = 5.0) -> int:
        """Remove all cached prefixes and return how many pages this freed. Raise as `EngineClient.flush_cache` does."""
        self._router.clear_caches()
        return sum(await asyncio.gather(*(engine.flush_cache(timeout) for engine in self._engines)))

    async def start_profile(
        self,
        output_dir: str | None = None,
        *,
        num_steps: int | None = None,
        with_stack: bool = False,
        timeout: float = 60.0,
    ) -> ProfileInfo:
        """Record a profile of each replica, in a folder `DP<number>` within `output_dir`.

        Each ends with `stop_profile` or after `num_steps` steps of its replica. Raise the errors of
        `EngineClient.start_profile`; then no replica records.
        """

        def start(number: int, engine: EngineClient) -> Awaitable[ProfileInfo]:
            folder = os.path.join(output_dir or "", replica_name(number))
            return engine.start_profile(folder, num_steps=num_steps, with_stack=with_stack, timeout=timeout)

        started = await self._on_each(start)
        problems = [found for found in started if isinstance(found, BaseException)]
        if problems:
            for engine, found in zip(self._engines, started):
                if isinstance(found, ProfileInfo):
                    with contextlib.suppress(InvalidRequestError):
                        await engine.stop_profile()
            raise problems[0]
        return _merge_profiles(started)

    async def stop_profile(self, timeout: float = 600.0) -> ProfileInfo:
        """End the profiles that still run and wait until they are written; return their total number of steps.

        Raise the errors of `EngineClient.stop_profile` if none ran or one can't be written.
        """
        stopped = await self._on_each(lambda _, engine: engine.stop_profile(timeout))
        problems = [found for found in stopped if isinstance(found, BaseException)]
        # An `InvalidRequestError` means that a replica's profile had ended by itself and is written.
        serious = [problem for problem in problems if not isinstance(problem, InvalidRequestError)]
        if serious or len(problems) == len(stopped):
            raise (serious or problems)[0]
        return _merge_profiles(stopped)

    async def shutdown(self, timeout: float = 10.0) -> None:
        """Close the clients of all engines; open requests and calls end with an error. End the own engines, by force
        after `timeout` seconds."""
        self._dead = self._dead or "the engine has been shut down"
        for engine in self._engines:
            await engine.shutdown()
        if self._processes is not None:
            await self._processes.shutdown(timeout)

    def end(self, reason: str) -> None:
        """Report that an engine has ended unexpectedly: all requests end with `reason`."""
        if self._dead is None:
            self._dead = reason
            for engine in self._engines:
                engine.end(reason)
            self.on_death.set_result(reason)

    def apply_update(self, update: bytes, origin: int) -> None:
        """Apply an update of another API process to the router."""
        self._router.apply(_UPDATES.decode(update), origin)

    def forget(self, origin: int) -> None:
        """Forget the requests of another API process, which has ended."""
        self._router.forget(origin)

    def _send_update(self, update: PlacementUpdate) -> None:
        assert self._broadcast is not None
        self._broadcast.send_update(msgspec.msgpack.encode(update))

    async def _on_each(
        self, ask: Callable[[int, EngineClient], Awaitable[ProfileInfo]]
    ) -> list[ProfileInfo | BaseException]:
        return await asyncio.gather(
            *(ask(number, engine) for number, engine in enumerate(self._engines)), return_exceptions=True
        )

    def _queue_full_reason(self, request: EngineRequest) -> str | None:
        """Return why a request is refused, or None. A prompt counts until it is complete, but not what is cached."""
        num_open = self._router.num_open
        return self._gate.reason(
            request,
            num_waiting=num_open - self.info.max_running_requests,
            num_open=num_open,
            num_tokens=self._router.pending_tokens,
        )

    def _with_seed(self, request: EngineRequest) -> EngineRequest:
        """Add a seed to a request without one; seeds drawn by the replicas themselves would be equal."""
        if request.sampling.seed is not None:
            return request
        sampling = msgspec.structs.replace(request.sampling, seed=self._random.getrandbits(63))
        return msgspec.structs.replace(request, sampling=sampling)


def _merge_profiles(profiles: Sequence[ProfileInfo | BaseException]) -> ProfileInfo:
    found = [profile for profile in profiles if isinstance(profile, ProfileInfo)]
    return ProfileInfo(
        os.path.commonpath([profile.directory for profile in found]), sum(profile.num_steps for profile in found)
    )
