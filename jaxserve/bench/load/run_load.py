"""Runs a load: sends conversations when their time has come, so many at once at most, and gathers the records."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.bench.datasets.prompts import Conversation, Prompt
from jaxserve.bench.load.client import Client
from jaxserve.bench.load.client_load import ClientLoad, Watch
from jaxserve.bench.load.records import Record

_GONE = "not sent: an earlier turn of its conversation failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Everything that was seen. `start` is by `time.perf_counter()`, `duration` in seconds to the last answer's end;
    `interrupted` if it was cut before all were done."""

    records: list[Record]
    start: float
    duration: float
    interrupted: bool
    client: ClientLoad


class Load:
    """One run, and its state while it goes on."""

    def __init__(
        self,
        client: Client,
        conversations: Sequence[Conversation],
        times: Sequence[float],
        *,
        max_concurrency: int | None = None,
        id_prefix: str = "",
        seed: int | None = None,
    ) -> None:
        """`times` say when each conversation begins. With a `seed`, request i carries `seed + i`."""
        self._client, self._conversations, self._times = client, conversations, times
        self._gate = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._seed = seed
        self.start = 0.0
        self.open = 0
        self._numbers: list[int] = []
        self.records: list[Record] = []
        for conversation in conversations:
            self._numbers.append(len(self.records))
            for prompt in conversation.prompts:
                name = f"{id_prefix}{len(self.records)}"
                self.records.append(Record(name, prompt.output_tokens, prompt.prompt_tokens))

    async def run(self, stop: asyncio.Event) -> Run:
        """Send everything; when `stop` is set, what is open is cut and what was measured is returned."""
        watch = Watch()
        # What was prepared will not become garbage; collections during the run need not look at it
        gc.collect()
        gc.freeze()
        watch.start()
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
            client = watch.stop()
            gc.unfreeze()
        if not interrupted:
            sending.result()
        for record in self.records:
            if record.status == "open":
                record.status, record.error = "unfinished", "not sent before the run was ended"
        return Run(self.records, self.start, end - self.start, interrupted, client)

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for conversation, at, number in zip(self._conversations, self._times, self._numbers):
                wait = self.start + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._converse(conversation, number))

    async def _converse(self, conversation: Conversation, first: int) -> None:
        history: list[dict[str, Any]] = []
        if conversation.system is not None:
            history.append({"role": "system", "content": conversation.system})
        for number, prompt in enumerate(conversation.prompts, start=first):
            if number > first and conversation.pause:
                await asyncio.sleep(conversation.pause)
            record = self.records[number]
            await self._ask(record, prompt, history, number)
            if record.status != "ok":
                for left in self.records[number + 1 : first + len(conversation.prompts)]:
                    left.status, left.error = "failed", _GONE
                return
            if len(conversation.prompts) > 1:
                history += [{"role": "user", "content": prompt.content}, {"role": "assistant", "content": record.text}]

    async def _ask(self, record: Record, prompt: Prompt, history: list[dict[str, Any]], number: int) -> None:
        came = time.perf_counter()
        async with self._gate:
            self.open += 1
            record.queued = time.perf_counter() - came
            try:
                await self._client.ask(record, prompt, history, None if self._seed is None else self._seed + number)
            finally:
                self.open -= 1


def count_with(records: Sequence[Record], count: Callable[[str], int]) -> None:
    """Counts answers whose server sent no usage by their text."""
    for record in records:
        if record.counted_by == "chunks" and record.token_times:
            record.counted_by, record.output_tokens = "tokenizer", count(record.text)
