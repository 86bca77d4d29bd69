"""`/v1/completions`: continues prompts (texts or ids), whole or streamed. Owns the shape of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jaxserve.api_types import EngineRequest, SamplingParams, TokenLogprobs
from jaxserve.server.generation.answers import AnswerPart
from jaxserve.server.generation.engine_requests import compile_grammar, engine_requests
from jaxserve.server.generation.prompts import max_output_tokens, read_prompts, run_off_event_loop
from jaxserve.server.generation.responder import ResponseChoice, TotalUsage, respond
from jaxserve.server.generation.structured_fields import structured_outputs
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.model_tasks import require_generating
from jaxserve.server.openai.chunks import OpenAIShape
from jaxserve.server.openai.logprobs import completion_logprobs, extend, prompt_logprobs, prompt_offsets
from jaxserve.server.openai.protocol import CompletionRequest
from jaxserve.server.openai.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, usage_info
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.output import OutputDelta

DEFAULT_MAX_TOKENS = 16


async def completions(state: ServerState, exchange: HttpExchange, request: CompletionRequest) -> None:
    """Answer one request."""
    loaded = require_generating(state)
    requests, echoed = await prepare(state, loaded, exchange, request)
    response_id = request.response_id("cmpl", exchange.request_id)
    shape = _CompletionShape(state, loaded, request, response_id, len(requests), echoed)
    ids = (response_id, *request.client_ids)
    await respond(state, loaded, exchange, requests, shape, stream=bool(request.stream), ids=ids)


async def prepare(
    state: ServerState, loaded: LoadedModel, exchange: HttpExchange, request: CompletionRequest
) -> tuple[list[EngineRequest], list[tuple[str, list[int]]]]:
    """Return what the engine is to compute, and for each prompt what `echo` puts before its outputs.

    Raises `InvalidRequestError`.
    """
    request.check_supported()
    texts, prompts = await read_prompts(
        state,
        loaded,
        request.prompt,
        request.n,
        add_special_tokens=request.add_special_tokens is not False,
        param="prompt",
    )
    echoed = await _echo(state, loaded, request, texts, prompts)
    samplings = _samplings(loaded, request, prompts)
    grammars = [await compile_grammar(state, loaded, structured_outputs(request))] * len(prompts)
    requests = engine_requests(
        loaded,
        request.response_id("cmpl", exchange.request_id),
        prompts,
        samplings,
        grammars,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    return requests, echoed


async def _echo(
    state: ServerState, loaded: LoadedModel, request: CompletionRequest, texts: list[str], ids: list[list[int]]
) -> list[tuple[str, list[int]]]:
    """Return for each prompt the text that `echo` puts before its outputs, and the tokens' offsets in it."""
    if not request.echo:
        return [("", [])] * len(ids)
    tokenizer, skip = loaded.tokenizer, request.skip_special_tokens is not False
    add_special_tokens = request.add_special_tokens is not False

    def echo() -> list[tuple[str, list[int]]]:
        echoed = texts or [tokenizer.decode(prompt, skip_special_tokens=skip) for prompt in ids]
        if request.logprobs is None:
            return [(text, []) for text in echoed]
        if texts:
            offsets = [tokenizer.text_offsets(text, add_special_tokens=add_special_tokens) for text in texts]
        else:
            offsets = [prompt_offsets(tokenizer, prompt, skip_special_tokens=skip) for prompt in ids]
        return list(zip(echoed, offsets, strict=True))

    return await run_off_event_loop(state, sum(map(len, texts or ids)), echo)


def _samplings(loaded: LoadedModel, request: CompletionRequest, prompts: list[list[int]]) -> list[SamplingParams]:
    by_limit: dict[int, SamplingParams] = {}
    samplings = []
    for prompt in prompts:
        default = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
        limit = max_output_tokens(len(prompt), request.max_tokens, default, loaded, param="prompt")
        if limit not in by_limit:
            by_limit[limit] = request.sampling(
                loaded.sampling_defaults.options,
                max_tokens=limit,
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if request.echo else None,
            )
        samplings.append(by_limit[limit])
    return samplings


@dataclass
class _EchoedChoice:
    """The echoed prompt of a choice, and the tokens whose log probabilities wait for their text."""

    echoed: str
    prompt_offsets: list[int]
    # Tokens whose text is held back, as a stop string may still cut it off, and the offsets where they would begin.
    held: list[tuple[TokenLogprobs, int]] = field(default_factory=list)
    num_chars: int = 0


class _CompletionShape(OpenAIShape):
    """The shape of a response; the first part of a choice also has the echoed prompt."""

    kind = "text_completion"
    before = '"text":'
    after = ',"logprobs":null,"finish_reason":null'

    def __init__(
        self,
        state: ServerState,
        loaded: LoadedModel,
        request: CompletionRequest,
        id: str,
        num_choices: int,
        echoed: list[tuple[str, list[int]]],
    ) -> None:
        super().__init__(state, loaded, request, id, num_choices, logprobs=request.logprobs is not None)
        self._request = request
        per_prompt = num_choices // len(echoed)
        self._waiting = [_EchoedChoice(*echoed[index // per_prompt]) for index in range(num_choices)]

    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        """Return a chunk, or nothing."""
        if self.plain and choice.started and delta.finish_reason is None:
            return self.text_chunk(choice, delta.text) if delta.text else b""
        part = self._choice(choice, delta)
        if part.text or part.logprobs or part.token_ids or part.prompt_token_ids or part.finish_reason:
            return self.choice_chunk(choice, part)
        return b""

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> CompletionResponse:
        """Return the whole response."""
        shaped = [self._choice(choice, choice.output) for choice in choices]
        return CompletionResponse(**self.head, choices=shaped, usage=usage_info(usage))

    def _choice(self, choice: ResponseChoice, delta: OutputDelta) -> CompletionChoice:
        """Return a part of a choice, or all of it."""
        first, ids = not choice.started, self._request.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=self._waiting[choice.index].echoed + delta.text if first else delta.text,
            logprobs=self._logprobs(choice, delta),
            finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
            stop_reason=delta.stop_reason,
            matched_stop=delta.matched_stop,
            token_ids=delta.token_ids if ids else msgspec.UNSET,
            prompt_token_ids=choice.prompt_ids if ids and first else msgspec.UNSET,
        )

    def _logprobs(self, choice: ResponseChoice, delta: OutputDelta) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        waiting = self._waiting[choice.index]
        waiting.num_chars += len(delta.text)
        waiting.held += zip(delta.logprobs, delta.text_offsets, strict=True)
        num_ready = len(waiting.held)
        if delta.finish_reason is None:
            num_ready = sum(offset <= waiting.num_chars for _, offset in waiting.held)
        ready, waiting.held = waiting.held[:num_ready], waiting.held[num_ready:]
        offsets = [len(waiting.echoed) + min(offset, waiting.num_chars) for _, offset in ready]
        output = completion_logprobs(self.tokenizer, [entry for entry, _ in ready], offsets)
        if choice.started or not self._request.echo or not delta.prompt_logprobs:
            return output if ready else None
        shaped = prompt_logprobs(self.tokenizer, choice.prompt_ids, delta.prompt_logprobs, waiting.prompt_offsets)
        extend(shaped, output)
        return shaped
