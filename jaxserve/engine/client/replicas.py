"""Several engines, each in a process and on devices of its own, behind the interface of one: `--dp-mode replicas`.

It owns the choice of a replica for each request and what the replicas are together: their description, readings, health
and end. When one ends unasked, all that is open fails and the service is over, as with a single engine. What an engine
is, and how it is spoken to, `EngineClient` knows. It belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from jaxserve.api_types import EngineRequest, EngineStats, Profile, ReplicaReading
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client.aggregate import merged_info, merged_stats, replica_name
from jaxserve.engine.client.async_client import WORKER, EngineClient, to_the_end
from jaxserve.engine.client.device_assignment import find_devices, shares
from jaxserve.engine.client.replica_router import ReplicaPlacement
from jaxserve.engine.client.stream import RequestStream
from jaxserve.engine.process.launch_protocol import Share
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError

logger = logging.getLogger("jaxserve.engine")


class Replicas:
    """Engines that are all alike, as one. `launch` starts them, `shutdown` ends them.

    `on_death` resolves with the reason when one of them ends unasked.
    """

    def __init__(self, engines: Sequence[EngineClient], placement: ReplicaPlacement, config: EngineConfig) -> None:
        self._engines = tuple(engines)
        self._placement = placement
        self._max_queued_requests = config.max_queued_requests
        self._random = random.Random(config.random_seed)
        self._dead: str | None = None
        self.info = merged_info([engine.info for engine in engines])
        self.on_death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for number, engine in enumerate(engines):
            engine.on_death.add_done_callback(functools.partial(self._on_death, number))

    @classmethod
    async def launch(cls, config: EngineConfig, *, module: str = WORKER) -> Replicas:
        """Start `dp_size` engines at once and wait until all are ready. Raises what kept the first of them that failed
        from starting, with none left behind."""
        own = shares(config, await find_devices(config), os.environ)
        for share in own:
            given = " ".join(f"{name}={value}" for name, value in share.environment.items())
            logger.info("Starting replica %s of %d, with %s", share.name, len(own), given)
        # How many may wait is said of all of them, so it is watched here.
        alike = msgspec.structs.replace(config, max_queued_requests=None)
        engines = await _all_or_none([_started(alike, module, share) for share in own])
        info, stats = engines[0].info, engines[0].stats
        placement = ReplicaPlacement(
            len(engines),
            num_slots=info.max_running_requests,
            num_pages=0 if config.disable_radix_cache else info.num_pages + stats.num_host_pages,
            page_size=info.page_size,
        )
        return cls(engines, placement, config)

    @property
    def stats(self) -> EngineStats:
        """The last readings of all, added up."""
        return merged_stats([engine.stats for engine in self._engines])

    @property
    def replicas(self) -> tuple[ReplicaReading, ...]:
        """Each engine process and its last reading."""
        return tuple(ReplicaReading(engine.pid, engine.stats) for engine in self._engines)

    @property
    def health(self) -> str | None:
        """None while every replica makes progress or has nothing to do, else what is wrong with the first that isn't
        well."""
        if self._dead is not None:
            return self._dead
        for number, engine in enumerate(self._engines):
            if engine.health is not None:
                return f"{replica_name(number)}: {engine.health}"
        return None

    def submit(self, request: EngineRequest) -> RequestStream:
        """As `EngineClient.submit`; which replica has it shows in nothing but its speed."""
        [stream] = self.submit_all([request])
        return stream

    def submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        """Hand several over, to each replica all of its own in one message. Raises as `submit` does."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        names: set[str] = set()
        for request in requests:
            if request.request_id in names or self._placement.replica_of(request.request_id) is not None:
                raise InvalidRequestError(
                    f"a request with the id {request.request_id!r} is open already", param="request_id"
                )
            names.add(request.request_id)
        streams: dict[str, RequestStream] = {}
        chosen: dict[int, list[EngineRequest]] = {}
        for request in requests:
            if refusal := self._refusal():
                stream = streams[request.request_id] = RequestStream(request, self.abort)
                stream.fail(refusal)
            else:
                chosen.setdefault(self._placement.place(request), []).append(self._seeded(request))
        try:
            for number, own in chosen.items():
                for stream in self._engines[number].submit_all(own, self._placement.watch):
                    streams[stream.request_id] = stream
        except JaxserveError:
            self.abort(streams)
            for request in requests:
                if request.request_id not in streams:
                    self._placement.withdraw(request.request_id)
            raise
        return [streams[request.request_id] for request in requests]

    def abort(self, request_ids: Iterable[str]) -> None:
        """As `EngineClient.abort`."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            number = self._placement.replica_of(request_id)
            if number is not None:
                by_replica.setdefault(number, []).append(request_id)
        for number, own in by_replica.items():
            self._engines[number].abort(own)

    async def refresh_stats(self, timeout: float = 5.0) -> EngineStats:
        """Readings of all, added up. Raises as `EngineClient.refresh_stats` does, if one of them does."""
        return merged_stats(await asyncio.gather(*(engine.refresh_stats(timeout) for engine in self._engines)))

    async def flush_cache(self, timeout: float = 5.0) -> int:
        """Forget every cached prefix everywhere; how many pages that gave back. Raises as `EngineClient` does."""
        self._placement.forget()
        return sum(await asyncio.gather(*(engine.flush_cache(timeout) for engine in self._engines)))

    async def start_profile(
        self,
        output_dir: str | None = None,
        *,
        num_steps: int | None = None,
        with_stack: bool = False,
        timeout: float = 60.0,
    ) -> Profile:
        """Record a profile of each, in a folder by its name within `output_dir`, until `stop_profile` or for
        `num_steps` of its steps. Raises as `EngineClient.start_profile` does; none records then."""

        def start(number: int, engine: EngineClient) -> Awaitable[Profile]:
            folder = os.path.join(output_dir or "", replica_name(number))
            return engine.start_profile(folder, num_steps=num_steps, with_stack=with_stack, timeout=timeout)

        started = await self._of_each(start)
        problems = [found for found in started if isinstance(found, BaseException)]
        if problems:
            for engine, found in zip(self._engines, started):
                if isinstance(found, Profile):
                    with contextlib.suppress(InvalidRequestError):
                        await engine.stop_profile()
            raise problems[0]
        return _together(started)

    async def stop_profile(self, timeout: float = 600.0) -> Profile:
        """End the profile wherever it still runs and wait until all is written; its steps are those of all replicas
        that it was ended on. Raises as `EngineClient.stop_profile` does, if none ran or one can't be written."""
        stopped = await self._of_each(lambda _, engine: engine.stop_profile(timeout))
        problems = [found for found in stopped if isinstance(found, BaseException)]
        # One whose steps were over has been written already.
        grave = [problem for problem in problems if not isinstance(problem, InvalidRequestError)]
        if grave or len(problems) == len(stopped):
            raise (grave or problems)[0]
        return _together(stopped)

    async def shutdown(self, timeout: float = 10.0) -> None:
        """End all of them, by force after `timeout` seconds, and whatever is still open with an error."""
        self._dead = self._dead or "the engine has been shut down"
        await asyncio.gather(*(engine.shutdown(timeout) for engine in self._engines))

    async def _of_each(self, ask: Callable[[int, EngineClient], Awaitable[Profile]]) -> list[Profile | BaseException]:
        return await asyncio.gather(
            *(ask(number, engine) for number, engine in enumerate(self._engines)), return_exceptions=True
        )

    def _refusal(self) -> str | None:
        """Why no further request may come in; as a scheduler says it, but of all replicas."""
        limit, num_open = self._max_queued_requests, self._placement.num_open
        if limit is None or num_open < limit + self.info.max_running_requests:
            return None
        return (
            f"queue full: {num_open - self.info.max_running_requests} requests wait and --max-queued-requests is "
            f"{limit}; try again later"
        )

    def _seeded(self, request: EngineRequest) -> EngineRequest:
        """With a seed if it brings none: replicas that draw their own would draw the same ones."""
        if request.sampling.seed is not None:
            return request
        sampling = msgspec.structs.replace(request.sampling, seed=self._random.getrandbits(63))
        return msgspec.structs.replace(request, sampling=sampling)

    def _on_death(self, number: int, death: asyncio.Future[str]) -> None:
        if death.cancelled() or self._dead is not None:
            return
        self._dead = f"{replica_name(number)}: {death.result()}"
        for engine in self._engines:
            engine.bury(self._dead)
        self.on_death.set_result(self._dead)


# Replicas that have just said they are ready answer at once; a machine may be slow.
_READY_TIMEOUT = 60.0


async def _started(config: EngineConfig, module: str, share: Share) -> EngineClient:
    """One of them, with a first reading."""
    try:
        engine = await EngineClient.launch(config, module=module, share=share)
    except EngineDeadError as error:
        raise EngineDeadError(f"{share.name}: {error}") from error
    try:
        await engine.refresh_stats(_READY_TIMEOUT)
    except BaseException:
        await to_the_end(engine.shutdown(timeout=0.0))
        raise
    return engine


async def _all_or_none(launches: Sequence[Awaitable[EngineClient]]) -> list[EngineClient]:
    """All of them, or the first error and none."""
    tasks = [asyncio.ensure_future(launch) for launch in launches]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await to_the_end(_end_all(tasks))
        raise


async def _end_all(tasks: Sequence[asyncio.Future[EngineClient]]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, EngineClient):
            await ended.shutdown(timeout=0.0)


def _together(profiles: Sequence[Profile | BaseException]) -> Profile:
    found = [profile for profile in profiles if isinstance(profile, Profile)]
    return Profile(
        os.path.commonpath([profile.directory for profile in found]), sum(profile.num_steps for profile in found)
    )
