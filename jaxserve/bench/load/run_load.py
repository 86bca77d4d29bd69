"""Runs a load: sends each conversation at its time, limits how many are open, and collects the records."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.bench.datasets.prompts import BenchConversation, DatasetPrompt
from jaxserve.bench.load.client import LoadClient
from jaxserve.bench.load.client_load import ClientLoad, ClientMonitor
from jaxserve.bench.load.records import RequestRecord

_NOT_SENT = "not sent: an earlier turn of its conversation failed"


@dataclasses.dataclass(frozen=True, slots=True)
class LoadResult:
    """The records of a run. `start` is a time of `time.perf_counter()`, `duration` the seconds until the last response
    ended; `interrupted` says that the run was stopped before all requests were done."""

    records: list[RequestRecord]
    start: float
    duration: float
    interrupted: bool
    client: ClientLoad


class LoadRun:
    """One run over a list of conversations, and its progress: `records`, and `open`, the number of open requests."""

    def __init__(
        self,
        client: LoadClient,
        conversations: Sequence[BenchConversation],
        times: Sequence[float],
        *,
        max_concurrency: int | None = None,
        id_prefix: str = "",
        seed: int | None = None,
    ) -> None:
        """Take the start times of the conversations in seconds. With a `seed`, request i has the seed `seed + i`."""
        self._client, self._conversations, self._times = client, conversations, times
        self._open_limit = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._seed = seed
        self.start = 0.0
        self.open = 0
        self._numbers: list[int] = []
        self.records: list[RequestRecord] = []
        for conversation in conversations:
            self._numbers.append(len(self.records))
            for prompt in conversation.prompts:
                name = f"{id_prefix}{len(self.records)}"
                self.records.append(RequestRecord(name, prompt.output_tokens, prompt.prompt_tokens))

    async def run(self, stop: asyncio.Event) -> LoadResult:
        """Send everything and return the result; setting `stop` cancels open requests and ends the run early."""
        monitor = ClientMonitor()
        # The prepared prompts live until the end: freezing them spares collections during the run from scanning them.
        gc.collect()
        gc.freeze()
        monitor.start()
        self.start = time.perf_counter()
        sending = asyncio.create_task(self._send_all())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
            interrupted = not sending.done()
            end = time.perf_counter()
        finally:
            for task in (sending, stopping):
                task.cancel()
            await asyncio.gather(sending, stopping, return_exceptions=True)
            client = monitor.stop()
            gc.unfreeze()
        if not interrupted:
            sending.result()
        for record in self.records:
            if record.status == "open":
                record.status, record.error = "unfinished", "not sent before the run was ended"
        return LoadResult(self.records, self.start, end - self.start, interrupted, client)

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for conversation, at, number in zip(self._conversations, self._times, self._numbers):
                wait = self.start + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._send_conversation(conversation, number))

    async def _send_conversation(self, conversation: BenchConversation, first: int) -> None:
        history: list[dict[str, Any]] = []
        if conversation.system is not None:
            history.append({"role": "system", "content": conversation.system})
        for number, prompt in enumerate(conversation.prompts, start=first):
            if number > first and conversation.pause:
                await asyncio.sleep(conversation.pause)
            record = self.records[number]
            await self._send(record, prompt, history, number)
            if record.status != "ok":
                for left in self.records[number + 1 : first + len(conversation.prompts)]:
                    left.status, left.error = "failed", _NOT_SENT
                return
            if len(conversation.prompts) > 1:
                history += [{"role": "user", "content": prompt.content}, {"role": "assistant", "content": record.text}]

    async def _send(
        self, record: RequestRecord, prompt: DatasetPrompt, history: list[dict[str, Any]], number: int
    ) -> None:
        arrived = time.perf_counter()
        async with self._open_limit:
            self.open += 1
            record.queued = time.perf_counter() - arrived
            try:
                await self._client.send(record, prompt, history, None if self._seed is None else self._seed + number)
            finally:
                self.open -= 1


def count_answer_tokens(records: Sequence[RequestRecord], count: Callable[[str], int]) -> None:
    """Count the tokens of answers by their text where the server sent no usage."""
    for record in records:
        if record.counted_by == "chunks" and record.token_times:
            record.counted_by, record.output_tokens = "tokenizer", count(record.text)
