"""`/generate`: SGLang's own route, whole or streamed; each event of a stream has the whole text so far.

Owns the shape of its outputs. The response to a list of prompts, or to `n` above 1, is a list.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.api_types import FinishReason, SamplingParams, TokenLogprobs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.prompts import (
    check_prompt,
    compile_grammar,
    encode_texts,
    engine_requests,
    max_output_tokens,
    split_prompts,
)
from jaxserve.server.generation.structured_fields import structured_outputs
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.sse import EventStream
from jaxserve.server.openai.logprobs import LOGPROB_FLOOR
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.server.sglang.generate_protocol import GenerateOutput, GenerateRequest, GenerateSampling, MetaInfo
from jaxserve.text.output import OutputDelta
from jaxserve.text.tokenizers.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128


@dataclass
class _Output:
    """One sequence, the id that clients know it by, and its output so far."""

    id: str
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


async def generate(state: ServerState, exchange: HttpExchange, request: GenerateRequest) -> None:
    """Answer one request."""
    loaded = state.require_loaded()
    request.check_supported()
    prompts, param, is_list = await _prompts(state, loaded, request)
    if isinstance(request.sampling_params, list) and len(request.sampling_params) != len(prompts):
        raise InvalidRequestError(
            f"sampling_params has {len(request.sampling_params)} entries for {len(prompts)} prompts",
            param="sampling_params",
        )
    sampling_params = list(request.samplings.items())
    if len(sampling_params) == 1:
        sampling_params *= len(prompts)
    samplings = [
        _sampling(loaded, request, where, params, prompt, param)
        for (where, params), prompt in zip(sampling_params, prompts, strict=True)
    ]
    grammars = {
        where: await compile_grammar(state, loaded, structured_outputs(params, f"{where}."))
        for where, params in request.samplings.items()
    }
    of_prompts = [grammars[where] for where, _ in sampling_params]
    response_id = request.rid if isinstance(request.rid, str) else exchange.request_id
    prompt_rids = _prompt_rids(request, len(prompts))
    requests = engine_requests(loaded, response_id, prompts, samplings, of_prompts, request)
    n = len(requests) // len(prompts)
    ids = [name for rid in prompt_rids for name in _numbered(rid, n)] or _numbered(response_id, len(requests))
    outputs = [_Output(name, sequence.prompt_ids) for name, sequence in zip(ids, requests, strict=True)]
    generation = Generation(state, loaded, requests, exchange.arrival)
    responder = _GenerateResponder(loaded.tokenizer, request, outputs, exchange.arrival)
    parts: dict[str, tuple[int, ...]] = {name: (index,) for index, name in enumerate(ids)}
    parts |= {rid: tuple(range(number * n, number * n + n)) for number, rid in enumerate(prompt_rids)}
    with state.abortable((response_id, exchange.request_id), generation, parts):
        if request.stream:
            await responder.stream(generation, exchange)
        else:
            await responder.respond(generation, exchange, as_list=is_list or len(outputs) > 1)


def _prompt_rids(request: GenerateRequest, num_prompts: int) -> list[str]:
    """Return the id of each prompt, if the request has a list of them. Raises `InvalidRequestError`."""
    if not isinstance(request.rid, list):
        return []
    if len(request.rid) != num_prompts:
        raise InvalidRequestError(f"rid has {len(request.rid)} ids for {num_prompts} prompts", param="rid")
    [(rid, count)] = Counter(request.rid).most_common(1)
    if count > 1:
        raise InvalidRequestError(f"rid has {rid!r} {count} times: each prompt needs its own id", param="rid")
    return request.rid


def _numbered(name: str, count: int) -> list[str]:
    """Return the ids of `count` outputs, as SGLang numbers them."""
    return [name] if count == 1 else [f"{name}_{index}" for index in range(count)]


async def _prompts(
    state: ServerState, loaded: LoadedModel, request: GenerateRequest
) -> tuple[list[list[int]], str, bool]:
    """Return the ids of each prompt, the name of the prompts' field, and whether it is a list of prompts."""
    given, param = (request.text, "text") if request.input_ids is None else (request.input_ids, "input_ids")
    if given is None or (request.text is not None and request.input_ids is not None):
        raise InvalidRequestError("Give one of text and input_ids", param="text")
    texts, prompts = split_prompts(given, _num_samples(request), loaded.engine.info, param=param)
    if texts:
        prompts = await encode_texts(state, loaded, texts, add_special_tokens=True, param=param)
    for prompt in prompts:
        check_prompt(prompt, loaded.engine.info, param=param)
    return prompts, param, isinstance(given, list) and not isinstance(given[0], int)


def _num_samples(request: GenerateRequest) -> int | None:
    """Return the number of samples of each prompt. It must be the same for all prompts, as in SGLang."""
    numbers = {sampling.n for sampling in request.samplings.values()}
    if len(numbers) > 1:
        raise InvalidRequestError("n must be the same in all of sampling_params", param="sampling_params")
    return numbers.pop()


def _sampling(
    loaded: LoadedModel, request: GenerateRequest, where: str, params: GenerateSampling, prompt: list[int], param: str
) -> SamplingParams:
    default = max(DEFAULT_MAX_TOKENS, params.min_new_tokens or 0)
    limit = max_output_tokens(len(prompt), params.max_new_tokens, default, loaded.engine.info, param=param)
    logprobs = (request.top_logprobs_num or 0) if request.return_logprob else None
    prompt_logprobs = None if request.first_logprob is None else logprobs
    return params.sampling(where, max_tokens=limit, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


@dataclass
class _GenerateResponder:
    """Sends one response, whole or streamed."""

    tokenizer: Tokenizer
    request: GenerateRequest
    outputs: list[_Output]
    arrival: float

    async def respond(self, generation: Generation, exchange: HttpExchange, *, as_list: bool) -> None:
        """Send one JSON response when all sequences have ended."""
        ends: dict[int, GenerateOutput] = {}

        async def on_delta(index: int, delta: OutputDelta) -> None:
            self.outputs[index].push(delta)
            if delta.finish_reason is not None:
                ends[index] = self._shape(index)

        await generation.run(on_delta)
        await exchange.respond([ends[index] for index in range(len(ends))] if as_list else ends[0])

    async def stream(self, generation: Generation, exchange: HttpExchange) -> None:
        """Send server-sent events as tokens arrive."""
        out = EventStream(exchange.send)

        async def on_delta(index: int, delta: OutputDelta) -> None:
            self.outputs[index].push(delta)
            if delta.text or delta.token_ids or delta.finish_reason is not None:
                shaped = self._shape(index)
                if len(self.outputs) > 1:
                    shaped.index = index
                await out.write(b"data: " + msgspec.json.encode(shaped) + b"\n\n")

        async with out:
            await generation.run(on_delta)
            await out.finish()

    def _shape(self, index: int) -> GenerateOutput:
        output = self.outputs[index]
        last = output.last
        usage = None if last is None else last.usage
        meta = MetaInfo(
            id=output.id,
            finish_reason=_finish_reason(output),
            prompt_tokens=len(output.prompt_ids),
            completion_tokens=len(output.token_ids) if usage is None else usage.completion_tokens,
        )
        if usage is not None:
            meta.cached_tokens = usage.cached_tokens
            meta.e2e_latency = time.perf_counter() - self.arrival
        if self.request.return_logprob:
            self._add_logprobs(meta, output)
        return GenerateOutput(output.text, output.token_ids, meta)

    def _add_logprobs(self, meta: MetaInfo, output: _Output) -> None:
        start = self.request.first_logprob
        entries = [] if start is None else output.prompt_logprobs[start:]
        ids = output.prompt_ids[len(output.prompt_ids) - len(entries) :]
        meta.input_token_logprobs = [
            self._named(token, None if entry is None else entry.logprob) for token, entry in zip(ids, entries)
        ]
        meta.output_token_logprobs = [self._named(entry.token_id, entry.logprob) for entry in output.logprobs]
        if self.request.top_logprobs_num:
            meta.input_top_logprobs = [None if entry is None else self._top(entry) for entry in entries]
            meta.output_top_logprobs = [self._top(entry) for entry in output.logprobs]

    def _top(self, entry: TokenLogprobs) -> list[tuple[float | None, int, str | None]]:
        return [self._named(token, value) for token, value in zip(entry.top_ids, entry.top_logprobs)]

    def _named(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        text = self.tokenizer.token_text(token) if self.request.return_text_in_logprobs else None
        return None if logprob is None else max(logprob, LOGPROB_FLOOR), token, text


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
