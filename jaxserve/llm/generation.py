"""Runs the prompts of `LLM` that generate, and collects their outputs. Never tokenizes a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import msgspec
from tqdm import tqdm

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent
from jaxserve.engine.client import SharedEngine
from jaxserve.errors import RequestFailedError
from jaxserve.llm.outputs import PromptTask, RequestOutput, build_output
from jaxserve.text.output import OutputDelta, OutputProcessor, OutputSoFar
from jaxserve.text.requests import sample_requests
from jaxserve.text.tokenizers.tokenizer import Tokenizer


class OfflineGeneration:
    """The prompts that run in an engine."""

    def __init__(self, engine: SharedEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    def _requests(self, task: PromptTask) -> list[EngineRequest]:
        name = f"llm-{next(self._numbers)}"
        return sample_requests(
            name,
            task.ids,
            task.params,
            self._tokenizer,
            self._engine.info,
            priority=task.priority,
            cache_salt=task.cache_salt,
            grammar=task.grammar,
        )

    def run(self, tasks: list[PromptTask], use_tqdm: bool) -> list[RequestOutput]:
        """Run prompts and return their outputs."""
        requests = [self._requests(task) for task in tasks]
        outputs = {request.request_id: OutputSoFar() for group in requests for request in group}
        with tqdm(total=len(outputs), desc="generate", unit="seq", disable=not use_tqdm, dynamic_ncols=True) as bar:
            num_tokens = 0
            for request_id, delta in self._deltas([request for group in requests for request in group]):
                outputs[request_id].add(delta)
                num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None and bar.update():
                    bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tok/s")
        return [
            build_output(task, [outputs[request.request_id].delta for request in group])
            for task, group in zip(tasks, requests, strict=True)
        ]

    def stream(self, task: PromptTask) -> Generator[OutputDelta]:
        """Run a prompt and yield its output piece by piece; closing the generator aborts it."""
        for _, delta in self._deltas(self._requests(task)):
            yield delta

    def _deltas(self, requests: list[EngineRequest]) -> Generator[tuple[str, OutputDelta]]:
        """Run requests and yield (request id, delta) pairs until all have ended.

        Closing the generator aborts the requests that are still running.
        """
        processors = {request.request_id: OutputProcessor(self._tokenizer, request) for request in requests}
        ended: dict[str, OutputDelta] = {}
        try:
            next_events = self._engine.submit(requests)
            while processors:
                for event in next_events():
                    if event.request_id in ended:
                        delta = _with_cached_tokens(ended[event.request_id], event)
                    else:
                        delta = processors[event.request_id].push(event)
                        if delta.abort:
                            # The engine's last event of this request still brings the cached tokens
                            ended[event.request_id] = delta
                            self._engine.abort([event.request_id])
                            continue
                    if delta.finish_reason is FinishReason.ERROR:
                        raise RequestFailedError(delta.error or "the engine could not finish the request")
                    if delta.finish_reason is not None:
                        del processors[event.request_id]
                    yield event.request_id, delta
        finally:
            if processors:
                self._engine.discard(processors)


def _with_cached_tokens(delta: OutputDelta, last: TokenEvent) -> OutputDelta:
    """Return the delta that a stop string ended, with the cached tokens of the engine's last event."""
    if delta.usage is None or last.usage is None:
        return delta
    usage = msgspec.structs.replace(delta.usage, cached_tokens=last.usage.cached_tokens)
    return msgspec.structs.replace(delta, usage=usage)
