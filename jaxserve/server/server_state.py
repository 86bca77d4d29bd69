"""What all routes share: what is served, whether it can be served now, and the requests that are open.

Owns the phase of the server (starting, ready, draining, dead) and the threads that tokenize long texts. Never speaks
HTTP and never starts or stops a process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.errors import EngineDeadError
from jaxserve.observability.metrics import Metrics
from jaxserve.server.errors import UnavailableError

if TYPE_CHECKING:
    from jaxserve.engine.client import Engine
    from jaxserve.observability.engine_metrics import Reading
    from jaxserve.text.chat_template import Message
    from jaxserve.text.tokenizer import Tokenizer

Phase = Literal["starting", "ready", "draining", "dead"]


class Abortable(Protocol):
    """An open request, as `/abort_request` and the end of a drain see it."""

    def abort(self) -> int:
        """Ends what still runs; how many sequences that were."""
        ...


class Renderer(Protocol):
    """Makes prompts of conversations."""

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """See `ChatTemplate.render`."""
        ...

    async def close(self) -> None:
        """Gives back what it holds."""
        ...


@dataclass(frozen=True)
class Loaded:
    """What stands once the server is ready. `template_source` is empty for a model without a chat template."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: Renderer
    template_source: str


class Serving:
    """One served model. `load` makes it ready, `drain` and `die` end it."""

    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        self.config = config
        self.engine_config = engine_config
        self.model_name = config.served_model_name or engine_config.model
        self.created = int(time.time())
        cache_config = {
            "cache_dtype": engine_config.kv_cache_dtype,
            "enable_prefix_caching": str(not engine_config.disable_radix_cache),
            "gpu_memory_utilization": str(engine_config.mem_fraction_static),
        }
        self.metrics = Metrics(self.model_name, self._reading, cache_config)
        self.num_open = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.tokenizing = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self.tokenizing_large = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")
        self._loaded: Loaded | None = None
        self._draining = False
        self._death: str | None = None
        self._open: dict[str, set[Abortable]] = {}

    @property
    def phase(self) -> Phase:
        """Where the server is in its life."""
        if self._death is not None:
            return "dead"
        if self._draining:
            return "draining"
        return "starting" if self._loaded is None else "ready"

    @property
    def unhealthy(self) -> str | None:
        """Why work does not progress, None when it does (or nothing is loaded yet)."""
        if self._death is not None:
            return self._death
        return None if self._loaded is None else self._loaded.engine.health

    @property
    def loaded(self) -> Loaded | None:
        """The engine and its tokenizer, None while they are starting."""
        return self._loaded

    def load(self, loaded: Loaded) -> None:
        """From now on requests are served."""
        self._loaded = loaded

    def drain(self) -> None:
        """From now on new requests are refused; open ones go on."""
        self._draining = True

    def die(self, reason: str) -> None:
        """The engine has ended; nothing can be served any more."""
        self._death = reason

    def require(self) -> Loaded:
        """What a request needs. Raises `UnavailableError` or `EngineDeadError` when it can't be had."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._draining:
            raise UnavailableError("The server is shutting down")
        if self._loaded is None:
            raise UnavailableError("The server is starting; GET /ready answers 200 when it is ready")
        return self._loaded

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts a request as open until its response is written."""
        self.num_open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.idle.set()

    @contextmanager
    def abortable(self, names: tuple[str, ...], request: Abortable) -> Iterator[None]:
        """Lets `abort` find `request` by any of `names`, of which some may be the same."""
        for name in set(names):
            self._open.setdefault(name, set()).add(request)
        try:
            yield
        finally:
            for name in set(names):
                self._open[name].discard(request)
                if not self._open[name]:
                    del self._open[name]

    def abort(self, name: str) -> int:
        """Ends the open requests of that name; how many sequences that were."""
        return sum(request.abort() for request in self._open.get(name, ()))

    def abort_all(self) -> int:
        """Ends every open request; how many sequences that were."""
        everything: set[Abortable] = set()
        return sum(request.abort() for request in everything.union(*self._open.values()))

    def _reading(self) -> Reading | None:
        return None if self._loaded is None else (self._loaded.engine.info, self._loaded.engine.stats)
