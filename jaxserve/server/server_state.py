"""The state that all routes share: the loaded model, whether it can be served now, and the open requests.

Owns the server's phase (starting, ready, draining, dead) and the threads that tokenize long texts and check
grammars. Never speaks HTTP and never starts or stops a process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from jaxserve.config.sampling_defaults import SamplingDefaults
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import EngineDeadError
from jaxserve.model_source.pooling import ModelTask
from jaxserve.observability.metrics import Metrics
from jaxserve.server.errors import UnavailableError
from jaxserve.server.refusals import Refusals
from jaxserve.server.response_store import ResponseStore, StoredResponse
from jaxserve.server.siblings import (
    AbortQuestion,
    ApiProcessInfo,
    DeleteQuestion,
    DescribeQuestion,
    ItemQuestion,
    NoSiblings,
    OpenResponseQuestion,
    Question,
    ResponseQuestion,
    Siblings,
)

if TYPE_CHECKING:
    from jaxserve.api_types import ReplicaStats
    from jaxserve.engine.client import Engine
    from jaxserve.observability.engine_metrics import Reading
    from jaxserve.text.answers.formats import AnswerFormats
    from jaxserve.text.answers.thought_marks import ThoughtMarks
    from jaxserve.text.grammars.checking import GrammarChecker
    from jaxserve.text.prompt_forms import Message
    from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
    from jaxserve.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve.server")

# Each waits for a process that compiles a grammar.
_GRAMMAR_THREADS = 8

Phase = Literal["starting", "ready", "draining", "dead"]


class Abortable(Protocol):
    """An open request, as `/abort_request` and the end of a drain see it."""

    def abort(self, indexes: Sequence[int] | None = None) -> int:
        """Abort the sequences that still run, all or those of these indexes, and return their number."""
        ...


class PromptRenderer(Protocol):
    """Renders conversations as prompts."""

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Return the prompt; see `ChatTemplate.render`."""
        ...

    async def close(self) -> None:
        """Free the renderer's resources."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A running engine with its tokenizer and chat template; `template_source` is empty for a model without one.

    `grammars` checks the grammars of requests; `formats` are the formats of the model's answers.
    `task` is what it serves, `sampling_defaults` the options of requests that name none. `template_facts` is what was
    found out about the template so far.
    """

    engine: Engine
    tokenizer: Tokenizer
    chat_template: PromptRenderer
    template_source: str
    grammars: GrammarChecker
    formats: AnswerFormats
    task: ModelTask = field(default_factory=ModelTask)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    template_facts: dict[str, Any] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    @property
    def max_model_len(self) -> int:
        """The tokens that a request may have: the context, or the limit of a model that only pools, if it is lower."""
        context, pooled = self.engine.info.max_model_len, self.task.pooled
        if self.task.generates or pooled is None:
            return context
        return min(context, pooled.max_tokens or context)

    @functools.cached_property
    def escaped_marks(self) -> EscapedMarks:
        """The escaping of special tokens in texts of conversations. Raises `ConfigError` if they can't be escaped."""
        from jaxserve.text.tokenizers.escaped_marks import EscapedMarks

        return EscapedMarks(self.tokenizer)

    def thought_marks(self, written_end: str) -> ThoughtMarks | None:
        """Return the texts around reasoning in the model's tokens, if it reasons; its template ends it as given.

        The first time, this takes up to a second.
        """
        if self.formats.reasoning is None:
            return None
        if "thought_marks" not in self.template_facts:
            from jaxserve.text.answers.thought_marks import thought_marks

            shows = self.formats.shows_special_tokens(self.tokenizer)
            made = thought_marks(self.formats.reasoning, self.tokenizer, written_end, shows_special_tokens=shows)
            self.template_facts["thought_marks"] = made
        found: ThoughtMarks = self.template_facts["thought_marks"]
        return found

    def say_once(self, text: str) -> None:
        """Log a line, unless this server has logged it already."""
        if text not in self._said:
            self._said.add(text)
            logger.info(text)


class ServerState:
    """The state of a server with one model. `set_loaded` makes it ready; `mark_draining` and `mark_dead` end it.

    `siblings` are the other API processes. Metrics are kept in files of `metrics_dir`, if it is given, for all of them.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        siblings: Siblings | None = None,
        metrics_dir: str | None = None,
    ) -> None:
        self.config = config
        self.engine_config = engine_config
        self._siblings = siblings or NoSiblings()
        self.model_name = config.served_model_name or engine_config.model
        self.created = int(time.time())
        cache_config = {
            "cache_dtype": engine_config.kv_cache_dtype,
            "enable_prefix_caching": str(not engine_config.disable_radix_cache),
            "gpu_memory_utilization": str(engine_config.mem_fraction_static),
        }
        self.metrics = Metrics(self.model_name, self._reading, cache_config, self._replicas, metrics_dir)
        self.refusals = Refusals(
            self._reading,
            engine_config.max_num_queued_reqs,
            self.metrics.rejections,
            num_processes=config.api_server_count,
        )
        num_processes = config.api_server_count
        self.responses = ResponseStore(
            -(-config.max_stored_responses // num_processes),
            config.max_stored_response_bytes // num_processes,
            config.stored_response_seconds,
            on_change=self.metrics.record_stored_responses,
        )
        self.num_open_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.tokenizer_threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self.large_tokenizer_threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")
        self.grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._loaded: LoadedModel | None = None
        self._draining = False
        self._death_reason: str | None = None
        self._open_by_id: dict[str, set[tuple[Abortable, tuple[int, ...] | None]]] = {}

    @property
    def phase(self) -> Phase:
        """The server's current phase."""
        if self._death_reason is not None:
            return "dead"
        if self._draining:
            return "draining"
        return "starting" if self._loaded is None else "ready"

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine makes no progress; None while it does, and before the model is loaded."""
        if self._death_reason is not None:
            return self._death_reason
        return None if self._loaded is None else self._loaded.engine.health

    @property
    def loaded(self) -> LoadedModel | None:
        """The loaded model, None while it is loading."""
        return self._loaded

    def set_loaded(self, loaded: LoadedModel) -> None:
        """Serve requests from now on."""
        self._loaded = loaded

    def mark_draining(self) -> None:
        """Refuse new requests from now on; open ones continue."""
        self._draining = True

    def mark_dead(self, reason: str) -> None:
        """Refuse every request from now on, since the engine has ended."""
        self._death_reason = reason

    def require_loaded(self) -> LoadedModel:
        """Return the loaded model. Raises `UnavailableError` or `EngineDeadError` if it can't take requests now."""
        if self._death_reason is not None:
            raise EngineDeadError(self._death_reason)
        if self._draining:
            raise UnavailableError("The server is shutting down")
        if self._loaded is None:
            raise UnavailableError("The server is starting; GET /ready answers 200 when it is ready")
        return self._loaded

    @contextmanager
    def count_open_request(self) -> Iterator[None]:
        """Count a request as open until its response is written."""
        self.num_open_requests += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_open_requests -= 1
            if not self.num_open_requests:
                self.idle.set()

    @contextmanager
    def abortable(
        self, ids: tuple[str, ...], request: Abortable, parts: Mapping[str, tuple[int, ...]] | None = None
    ) -> Iterator[None]:
        """Let `abort` find `request` by any of `ids`, which may repeat, and only sequences of it by the ids in `parts`,
        which has their indexes."""
        entries = {**(parts or {}), **dict.fromkeys(ids)}
        for request_id, indexes in entries.items():
            self._open_by_id.setdefault(request_id, set()).add((request, indexes))
        try:
            yield
        finally:
            for request_id, indexes in entries.items():
                self._open_by_id[request_id].discard((request, indexes))
                if not self._open_by_id[request_id]:
                    del self._open_by_id[request_id]

    async def abort(self, request_id: str | None) -> int:
        """Abort the open requests or sequences with this id in all API processes, or all if it is None; return the
        number of sequences aborted."""
        aborted: list[int] = await self._ask_all(AbortQuestion(request_id))
        return sum(aborted)

    async def api_processes(self) -> list[ApiProcessInfo]:
        """Return all API processes of this server, this one first."""
        return [msgspec.convert(answer, ApiProcessInfo) for answer in await self._ask_all(DescribeQuestion())]

    def answer(self, question: Question) -> Any:
        """Answer a question of an API process."""
        match question:
            case AbortQuestion(None):
                return self.abort_own()
            case AbortQuestion(str(rid)):
                return sum(request.abort(indexes) for request, indexes in self._open_by_id.get(rid, ()))
            case DescribeQuestion():
                return msgspec.to_builtins(ApiProcessInfo(os.getpid(), self.num_open_requests))
            case ResponseQuestion(response_id):
                return msgspec.to_builtins(self.responses.get(response_id), builtin_types=(bytes,))
            case ItemQuestion(item_id):
                return self.responses.item(item_id)
            case OpenResponseQuestion(response_id, cancels):
                found = self.responses.snapshot(response_id, "cancelled" if cancels else "in_progress")
                if found is not None and cancels:
                    self.answer(AbortQuestion(response_id))
                return found
            case DeleteQuestion(response_id):
                return self.responses.delete(response_id)

    async def stored_response(self, response_id: str) -> StoredResponse | None:
        """Return a response that some API process keeps, or None."""
        own = self.responses.get(response_id)
        if own is not None:
            return own
        found = await self._ask_others(ResponseQuestion(response_id))
        return None if found is None else msgspec.convert(found, StoredResponse)

    async def stored_item(self, item_id: str) -> bytes | None:
        """Return an item of a response that some API process keeps, as JSON, or None."""
        found: bytes | None = self.responses.item(item_id) or await self._ask_others(ItemQuestion(item_id))
        return found

    async def open_response(self, response_id: str, *, cancels: bool = False) -> bytes | None:
        """Return a response that some API process is writing, as JSON, or None. With `cancels`, it is aborted."""
        question = OpenResponseQuestion(response_id, cancels)
        found: bytes | None = self.answer(question) or await self._ask_others(question)
        return found

    async def delete_response(self, response_id: str) -> bool:
        """Forget a response in all API processes, and return whether one kept it."""
        return any(await self._ask_all(DeleteQuestion(response_id)))

    async def _ask_all(self, question: Question) -> list[Any]:
        return [self.answer(question), *await self._siblings.ask(question)]

    async def _ask_others(self, question: Question) -> Any:
        """Return an answer of another API process that isn't None, if there is one."""
        return next((answer for answer in await self._siblings.ask(question) if answer is not None), None)

    def abort_own(self) -> int:
        """Abort every open request of this process and return the number of sequences aborted."""
        everything = {request for entries in self._open_by_id.values() for request, _ in entries}
        return sum(request.abort() for request in everything)

    def _reading(self) -> Reading | None:
        return None if self._loaded is None else (self._loaded.engine.info, self._loaded.engine.stats)

    def _replicas(self) -> Sequence[ReplicaStats]:
        return () if self._loaded is None else self._loaded.engine.replicas
