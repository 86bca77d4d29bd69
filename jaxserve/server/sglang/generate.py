"""`/generate`: SGLang's own route, whole or streamed; each event of a stream has the whole text so far.

Owns the shape of its outputs. The response to a list of prompts, or to `n` above 1, is a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.api_types import FinishReason, SamplingParams, TokenLogprobs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.answers import AnswerPart
from jaxserve.server.generation.engine_requests import compile_grammar, engine_requests, numbered, prompt_rids
from jaxserve.server.generation.prompts import max_output_tokens, read_prompts
from jaxserve.server.generation.responder import LOGPROB_FLOOR, ResponseChoice, ResponseShape, TotalUsage, respond
from jaxserve.server.generation.structured_fields import structured_outputs
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.model_tasks import require_generating
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.server.sglang.generate_protocol import GenerateOutput, GenerateRequest, GenerateSampling, MetaInfo
from jaxserve.text.output import OutputDelta
from jaxserve.text.tokenizers.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128


async def generate(state: ServerState, exchange: HttpExchange, request: GenerateRequest) -> None:
    """Answer one request."""
    loaded = require_generating(state)
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
    rids = prompt_rids(request.rid, len(prompts))
    requests = engine_requests(
        loaded,
        response_id,
        prompts,
        samplings,
        of_prompts,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    n = len(requests) // len(prompts)
    ids = [name for rid in rids for name in numbered(rid, n)] or numbered(response_id, len(requests))
    parts: dict[str, tuple[int, ...]] = {name: (index,) for index, name in enumerate(ids)}
    parts |= {rid: tuple(range(number * n, number * n + n)) for number, rid in enumerate(rids)}
    shape = _GenerateShape(loaded.tokenizer, request, ids, is_list or len(ids) > 1, exchange.arrival)
    await respond(
        state, loaded, exchange, requests, shape, stream=bool(request.stream), ids=(response_id,), parts=parts
    )


async def _prompts(
    state: ServerState, loaded: LoadedModel, request: GenerateRequest
) -> tuple[list[list[int]], str, bool]:
    """Return the ids of each prompt, the name of the prompts' field, and whether it is a list of prompts."""
    given, param = (request.text, "text") if request.input_ids is None else (request.input_ids, "input_ids")
    if given is None or (request.text is not None and request.input_ids is not None):
        raise InvalidRequestError("Give one of text and input_ids", param="text")
    _, prompts = await read_prompts(state, loaded, given, _num_samples(request), add_special_tokens=True, param=param)
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
    limit = max_output_tokens(len(prompt), params.max_new_tokens, default, loaded, param=param)
    logprobs = (request.top_logprobs_num or 0) if request.return_logprob else None
    prompt_logprobs = None if request.first_logprob is None else logprobs
    defaults = loaded.sampling_defaults.options
    return params.sampling(where, defaults, max_tokens=limit, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


@dataclass
class _GenerateShape(ResponseShape):
    """The shape of a response. `ids` are the ids of the outputs."""

    tokenizer: Tokenizer
    request: GenerateRequest
    ids: list[str]
    is_list: bool
    arrival: float
    shows_all = True

    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        """Return an event with all of the output so far, or nothing."""
        if not (delta.text or delta.token_ids or delta.finish_reason is not None):
            return b""
        shaped = self._output(choice)
        if len(self.ids) > 1:
            shaped.index = choice.index
        return b"data: " + msgspec.json.encode(shaped) + b"\n\n"

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> list[GenerateOutput] | GenerateOutput:
        """Return the whole response."""
        shaped = [self._output(choice) for choice in choices]
        return shaped if self.is_list else shaped[0]

    def _output(self, choice: ResponseChoice) -> GenerateOutput:
        output = choice.output
        meta = MetaInfo(
            id=self.ids[choice.index],
            finish_reason=_finish_reason(output),
            prompt_tokens=len(choice.prompt_ids),
            completion_tokens=choice.num_tokens,
        )
        if output.usage is not None:
            meta.cached_tokens = output.usage.cached_tokens
            meta.e2e_latency = choice.ended_at - self.arrival
        if self.request.return_logprob:
            self._add_logprobs(meta, choice.prompt_ids, output)
        return GenerateOutput(output.text, output.token_ids, meta)

    def _add_logprobs(self, meta: MetaInfo, prompt_ids: list[int], output: OutputDelta) -> None:
        start = self.request.first_logprob
        entries = [] if start is None else (output.prompt_logprobs or [])[start:]
        ids = prompt_ids[len(prompt_ids) - len(entries) :]
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


def _finish_reason(output: OutputDelta) -> dict[str, Any] | None:
    match output.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            return {"type": "stop", "matched": output.matched_stop}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(output.token_ids)}
        case other:
            return {"type": other.value, "message": "The request was ended before it was done"}
