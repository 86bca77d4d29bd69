"""`/generate`: SGLang's own route, whole or streamed; in a stream each event brings all the text there is so far.

Owns the shape of its answers. A list of prompts, or `n` above 1, is answered by a list.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.api_types import FinishReason, SamplingParams, TokenLogprobs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import to_http
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.prompts import (
    check_length,
    check_number,
    check_prompt,
    encode,
    engine_requests,
    output_limit,
)
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.http.sse import DONE, EventStream
from jaxserve.server.server_state import Loaded, Serving
from jaxserve.server.sglang.generate_protocol import GenerateOutput, GenerateRequest, GenerateSampling, MetaInfo
from jaxserve.text.output import OutputDelta
from jaxserve.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128

# JSON has no infinity.
_FLOOR = -9999.0


@dataclass
class _Output:
    """One sequence as it grows."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    last: OutputDelta | None = None

    def push(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs or []
        self.last = delta


async def generate(serving: Serving, exchange: Exchange, request: GenerateRequest) -> None:
    """Answers one request."""
    loaded = serving.require()
    request.refuse_unsupported()
    prompts, is_list = await _prompts(serving, loaded, request)
    name = "text" if request.input_ids is None else "input_ids"
    for prompt in prompts:
        check_prompt(prompt, loaded.engine.info, param=name)
    if isinstance(request.sampling_params, list) and len(request.sampling_params) != len(prompts):
        raise InvalidRequestError(
            f"sampling_params has {len(request.sampling_params)} entries for {len(prompts)} prompts",
            param="sampling_params",
        )
    asked = list(request.samplings.items())
    if len(asked) == 1:
        asked *= len(prompts)
    samplings = [
        _sampling(loaded, request, where, one, prompt, name)
        for (where, one), prompt in zip(asked, prompts, strict=True)
    ]
    response_id = request.rid or uuid.uuid4().hex
    # A client's own id may be open already; the engine's never is.
    requests = engine_requests(
        loaded,
        f"generate-{uuid.uuid4().hex}",
        prompts,
        samplings,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    outputs = [_Output(engine_request.prompt_ids) for engine_request in requests]
    generation = Generation(serving, loaded, requests, exchange.arrival)
    answer = _Answer(loaded.tokenizer, request, outputs, response_id, exchange.arrival)
    with serving.abortable((response_id, exchange.request_id), generation):
        if request.stream:
            await answer.stream(generation, exchange)
        else:
            await answer.whole(generation, exchange, as_list=is_list or len(outputs) > 1)


async def _prompts(serving: Serving, loaded: Loaded, request: GenerateRequest) -> tuple[list[list[int]], bool]:
    """The ids of each prompt, and whether they came as a list."""
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequestError("Give one of text and input_ids", param="text")
    n = _number(request)
    if request.text is not None:
        texts = [request.text] if isinstance(request.text, str) else request.text
        if not texts:
            raise InvalidRequestError("text is an empty list", param="text")
        check_number(len(texts), n)
        prompts = await encode(serving, loaded, texts, add_special_tokens=True, param="text")
        return prompts, not isinstance(request.text, str)
    ids = request.input_ids or []
    if ids and isinstance(ids[0], list):
        check_number(len(ids), n)
    else:
        check_number(1, n)
        check_length(len(ids), loaded.engine.info, param="input_ids")
    several = [item for item in ids if isinstance(item, list)]
    if several and len(several) != len(ids):
        raise InvalidRequestError("input_ids mixes token ids and lists of them", param="input_ids")
    return (several, True) if several else ([[item for item in ids if isinstance(item, int)]], False)


def _number(request: GenerateRequest) -> int | None:
    """How many samples of each prompt are asked for: of all of them the same, as in SGLang."""
    numbers = {sampling.n for sampling in request.samplings.values()}
    if len(numbers) > 1:
        raise InvalidRequestError("n must be the same in all of sampling_params", param="sampling_params")
    return numbers.pop()


def _sampling(
    loaded: Loaded, request: GenerateRequest, where: str, asked: GenerateSampling, prompt: list[int], name: str
) -> SamplingParams:
    default = max(DEFAULT_MAX_TOKENS, asked.min_new_tokens or 0)
    limit = output_limit(len(prompt), asked.max_new_tokens, default, loaded.engine.info, param=name)
    logprobs = (request.top_logprobs_num or 0) if request.return_logprob else None
    prompt_logprobs = None if request.first_logprob is None else logprobs
    return asked.sampling(where, max_tokens=limit, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


class _Answer:
    """One response, whole or streamed."""

    def __init__(
        self, tokenizer: Tokenizer, request: GenerateRequest, outputs: list[_Output], response_id: str, arrival: float
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._outputs = outputs
        self._id = response_id
        self._arrival = arrival

    async def whole(self, generation: Generation, exchange: Exchange, *, as_list: bool) -> None:
        """One JSON response when all has come."""
        ends: dict[int, GenerateOutput] = {}

        async def emit(index: int, delta: OutputDelta) -> None:
            self._outputs[index].push(delta)
            if delta.finish_reason is not None:
                ends[index] = self._shaped(index)

        await generation.run(emit)
        await exchange.respond([ends[index] for index in range(len(ends))] if as_list else ends[0])

    async def stream(self, generation: Generation, exchange: Exchange) -> None:
        """Server-sent events as tokens come."""
        out = EventStream(exchange.send)

        async def emit(index: int, delta: OutputDelta) -> None:
            self._outputs[index].push(delta)
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                shaped = self._shaped(index)
                if len(self._outputs) > 1:
                    shaped.index = index
                await out.write(b"data: " + msgspec.json.encode(shaped) + b"\n\n")

        try:
            await generation.run(emit)
            await out.finish(DONE)
        except Exception as error:
            if not out.started:
                raise
            await out.fail(to_http(error))

    def _shaped(self, index: int) -> GenerateOutput:
        output = self._outputs[index]
        last = output.last
        usage = None if last is None else last.usage
        meta = MetaInfo(
            id=self._id if len(self._outputs) == 1 else f"{self._id}-{index}",
            finish_reason=_finish_reason(output),
            prompt_tokens=len(output.prompt_ids),
            completion_tokens=len(output.token_ids) if usage is None else usage.completion_tokens,
        )
        if usage is not None:
            meta.cached_tokens = usage.cached_tokens
            meta.e2e_latency = time.perf_counter() - self._arrival
        if self._request.return_logprob:
            self._add_logprobs(meta, output)
        return GenerateOutput(output.text, output.token_ids, meta)

    def _add_logprobs(self, meta: MetaInfo, output: _Output) -> None:
        start = self._request.first_logprob
        entries = [] if start is None else output.prompt_logprobs[start:]
        ids = output.prompt_ids[len(output.prompt_ids) - len(entries) :]
        meta.input_token_logprobs = [
            self._named(token, None if entry is None else entry.logprob) for token, entry in zip(ids, entries)
        ]
        meta.output_token_logprobs = [self._named(entry.token_id, entry.logprob) for entry in output.logprobs]
        if self._request.top_logprobs_num:
            meta.input_top_logprobs = [None if entry is None else self._top(entry) for entry in entries]
            meta.output_top_logprobs = [self._top(entry) for entry in output.logprobs]

    def _top(self, entry: TokenLogprobs) -> list[tuple[float | None, int, str | None]]:
        return [self._named(token, value) for token, value in zip(entry.top_ids, entry.top_logprobs)]

    def _named(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        text = self._tokenizer.token_text(token) if self._request.return_text_in_logprobs else None
        return None if logprob is None else max(logprob, _FLOOR), token, text


def _finish_reason(output: _Output) -> dict[str, Any] | None:
    last = output.last
    if last is None or last.finish_reason is None:
        return None
    match last.finish_reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": last.matched_stop}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(output.token_ids)}
        case other:
            return {"type": other.value, "message": "The request was ended before it was done"}
