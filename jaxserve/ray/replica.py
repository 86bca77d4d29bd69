"""A replica of the engine: one run of an API process inside an actor of Ray Serve.

It owns the server's state and its engine process, and the followers of a mesh on other nodes. It opens no port:
requests come from the ingress, and go through the same application as those of `jaxserve serve`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.client import Engine, launch_engine
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.observability import log
from jaxserve.ray.forwarding import ForwardedRequest, Refusal, ResponsePiece, ResponseStart, WholeResponse, respond
from jaxserve.ray.mesh import Followers
from jaxserve.ray.metrics import RayGauges
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.server.loading import ModelLoader, fetch_model, load_model
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.server.siblings import Question

logger = logging.getLogger("jaxserve.server")

_EXPORT_SECONDS = 5.0
# What other replicas are asked is answered from memory.
_ASK_SECONDS, _POLL_SECONDS = 5.0, 0.05


class EngineReplica:
    """The deployment `engine`. Raises the errors of `load` if the model can't be served; then Serve tries again.

    `load` is called as `jaxserve serve` calls it, and the engine process runs `engine_module`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        load: ModelLoader = load_model,
        engine_module: str = "jaxserve.worker",
    ) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        _log_with_serve(engine_config)
        labels = {**(server_config.extra_metric_labels or {}), "replica": self._name}
        server_config = msgspec.structs.replace(server_config, extra_metric_labels=labels)
        self._followers = await Followers.start(engine_config, engine_module)
        self._role = _ReplicaRole(self._followers, engine_module)
        siblings = _OtherReplicas(self._name, context.deployment, context.app_name)
        self._state = ServerState(server_config, self._followers.leader_config, siblings)
        lifecycle = Lifecycle(self._state, self._role, load, [])
        self._app = lifecycle.server.app
        self._run = asyncio.create_task(lifecycle.run())
        await asyncio.wait((self._run, self._role.ready), return_when=asyncio.FIRST_COMPLETED)
        if not self._role.ready.done():
            self._run.result()  # raises what was not expected
            raise self._role.failure or EngineDeadError("the replica has ended while it was loading the model")
        self._gauges = RayGauges(self._state.metrics.registry)
        self._exporting = asyncio.create_task(self._export())

    async def handle(self, request: ForwardedRequest) -> AsyncIterator[ResponsePiece]:
        """Answer a request, unless this replica can't: then refuse it, so that another one answers."""
        if (reason := self._why_not()) is not None:
            yield Refusal(self._name, reason)
            return

        def refusal(status: int) -> str | None:
            return self._why_not() if status >= 500 else None

        async for piece in respond(self._app, request, self._name, refusal):
            yield piece

    async def handle_whole(self, request: ForwardedRequest) -> WholeResponse:
        """Answer a request that all replicas answer."""
        start, parts = None, []
        async for piece in respond(self._app, request, self._name, lambda status: None):
            if isinstance(piece, ResponseStart):
                start = piece
            else:
                assert isinstance(piece, bytes)
                parts.append(piece)
        assert start is not None
        return WholeResponse(start, b"".join(parts))

    async def answer(self, asker: str, question: bytes) -> Any:
        """Answer a question of another replica; None to its own."""
        return None if asker == self._name else self._state.answer(msgspec.json.decode(question, type=Question))

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine makes no progress, so that Serve starts another replica."""
        reason = self._state.unhealthy_reason
        if reason is None and self._run.done():
            reason = "the engine has ended"
        if reason is not None:
            raise EngineDeadError(reason)

    async def record_routing_stats(self) -> dict[str, float]:
        """Return what routers want to know: the number of slots, and how many tokens the prefix cache holds."""
        loaded = self._state.loaded
        if loaded is None:
            return {}
        info, stats = loaded.engine.info, loaded.engine.stats
        pages = 0 if self._state.engine_config.disable_radix_cache else info.num_pages + stats.num_host_pages
        return {"slots": info.max_running_requests, "cache_tokens": pages * info.page_size}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `scale_on_queue` reads: the running and waiting requests, and the slots."""
        loaded = self._state.loaded
        if loaded is None:
            return {"running": 0.0, "waiting": 0.0, "slots": 0.0}
        stats = loaded.engine.stats
        return {
            "running": float(stats.num_running),
            "waiting": float(stats.num_waiting),
            "slots": float(loaded.engine.info.max_running_requests),
        }

    async def __del__(self) -> None:
        """End the engine. Serve calls this when no request is open, or their time is over."""
        role = getattr(self, "_role", None)
        if role is not None:
            role.stop.set()
            await asyncio.gather(self._run, return_exceptions=True)
            await self._followers.stop()

    def _why_not(self) -> str | None:
        state = self._state
        if state.loaded is not None and state.loaded.engine.on_death.done():
            return f"the engine has ended: {state.loaded.engine.on_death.result()}"
        if state.phase != "ready":
            return f"the replica is {state.phase}"
        return state.unhealthy_reason

    async def _export(self) -> None:
        while not self._run.done():
            try:
                self._gauges.set_all()
            except Exception:
                logger.exception("Ray's metrics could not be set")
            await asyncio.sleep(_EXPORT_SECONDS)


class _ReplicaRole:
    """The role of the API process in an actor: Serve says when to stop, and hears why it can't start."""

    def __init__(self, followers: Followers, engine_module: str) -> None:
        self.stop = asyncio.Event()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: JaxserveError | None = None
        self._followers = followers
        self._engine_module = engine_module

    async def fetch_model(self) -> None:
        """Fetch the model to this node."""
        await fetch_model(self._followers.leader_config)

    async def start_engine(self) -> Engine:
        """Start the engine and, as the first of its mesh, wait for the followers."""
        return await launch_engine(self._followers.leader_config, module=self._engine_module)

    def report_failure(self, error: JaxserveError, exit_code: int) -> None:
        """Keep the error for the constructor."""
        logger.error("Can't start: %s", error)
        self.failure = error

    def report_ready(self, loaded: LoadedModel, seconds: float) -> None:
        """Let the constructor return."""
        logger.info("Ready: replica of Ray Serve in %.1f s", seconds)
        self.ready.set_result(None)

    async def finish_drain(self) -> None:
        """Return at once."""


class _OtherReplicas:
    """The other replicas of the deployment, as siblings: a response may be kept by any of them."""

    def __init__(self, name: str, deployment: str, application: str) -> None:
        self._name = name
        self._place = deployment, application

    async def ask(self, question: Question) -> list[Any]:
        """Return the answers of the others, or none if one of them doesn't answer."""
        deployment, application = self._place
        handle = serve.get_deployment_handle(deployment, application)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                while True:
                    try:
                        asked = handle.broadcast("answer", self._name, msgspec.json.encode(question))
                        found: list[Any] = await asked.results_async(timeout_s=_ASK_SECONDS)
                        return [answer for answer in found if answer is not None]
                    except DeploymentUnavailableError:  # a new handle has not heard of any replica yet
                        await asyncio.sleep(_POLL_SECONDS)
        except Exception as error:
            logger.warning("Other replicas could not be asked: %s", error)
            return []


def _log_with_serve(config: EngineConfig) -> None:
    """Write log lines where Serve writes those of this replica, with its id and those of requests."""
    log.setup(config.log_level, config_file=config.log_config_file)
    if config.log_config_file is None:
        logging.getLogger("jaxserve").handlers[:] = logging.getLogger("ray.serve").handlers
