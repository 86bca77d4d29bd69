"""`/v1/completions`: continues prompts (texts or ids), whole or streamed. Owns the shape of its choices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from jaxserve.api_types import SamplingParams, TokenLogprobs
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.prompts import (
    check_prompt,
    compile_grammar,
    encode_texts,
    engine_requests,
    max_output_tokens,
    run_off_event_loop,
    split_prompts,
)
from jaxserve.server.generation.structured_fields import structured_outputs
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.sse import DONE, EventStream
from jaxserve.server.openai.chunks import ChunkEncoder
from jaxserve.server.openai.logprobs import completion_logprobs, extend, prompt_logprobs, prompt_offsets
from jaxserve.server.openai.protocol import CompletionRequest
from jaxserve.server.openai.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, total_usage
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.output import OutputDelta
from jaxserve.text.tokenizers.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


@dataclass
class _ChoiceState:
    """The prompt of a choice and its output so far."""

    index: int
    prompt_ids: list[int]
    echoed: str
    prompt_offsets: list[int]
    # Tokens whose text is held back, as a stop string may still cut it off, and the offsets where they would begin.
    held: list[tuple[TokenLogprobs, int]] = field(default_factory=list)
    num_chars: int = 0
    opened: bool = False
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None


async def completions(state: ServerState, exchange: HttpExchange, request: CompletionRequest) -> None:
    """Answer one request."""
    loaded = state.require_loaded()
    request.check_supported()
    prompts, echoed, offsets = await _prompts(state, loaded, request)
    samplings = _samplings(loaded, request, prompts)
    grammars = [await compile_grammar(state, loaded, structured_outputs(request))] * len(prompts)
    response_id = request.response_id("cmpl", exchange.request_id)
    requests = engine_requests(loaded, response_id, prompts, samplings, grammars, request)
    n = samplings[0].n
    choices = [
        _ChoiceState(index, engine_request.prompt_ids, echoed[index // n], offsets[index // n])
        for index, engine_request in enumerate(requests)
    ]
    generation = Generation(state, loaded, requests, exchange.arrival)
    responder = _CompletionResponder(
        *(loaded.tokenizer, request, choices, n, response_id, state.model_name, int(time.time()))
    )
    with state.abortable((response_id, *request.client_ids, exchange.request_id), generation):
        await (responder.stream if request.stream else responder.respond)(generation, exchange)


async def _prompts(
    state: ServerState, loaded: LoadedModel, request: CompletionRequest
) -> tuple[list[list[int]], list[str], list[list[int]]]:
    """Return each prompt's ids, the text that `echo` puts before its outputs, and the tokens' offsets in it."""
    info = loaded.engine.info
    texts, ids = split_prompts(request.prompt, request.n, info, param="prompt")
    add_special_tokens = request.add_special_tokens is not False
    if texts:
        ids = await encode_texts(state, loaded, texts, add_special_tokens=add_special_tokens, param="prompt")
    for prompt in ids:
        check_prompt(prompt, info, param="prompt")
    if not request.echo:
        return ids, [""] * len(ids), [[]] * len(ids)
    tokenizer, skip = loaded.tokenizer, request.skip_special_tokens is not False

    def echo() -> tuple[list[str], list[list[int]]]:
        echoed = texts or [tokenizer.decode(prompt, skip_special_tokens=skip) for prompt in ids]
        if request.logprobs is None:
            return echoed, [[]] * len(ids)
        if texts:
            return echoed, [tokenizer.text_offsets(text, add_special_tokens=add_special_tokens) for text in texts]
        return echoed, [prompt_offsets(tokenizer, prompt, skip_special_tokens=skip) for prompt in ids]

    echoed, offsets = await run_off_event_loop(state, sum(map(len, texts or ids)), echo)
    return ids, echoed, offsets


def _samplings(loaded: LoadedModel, request: CompletionRequest, prompts: list[list[int]]) -> list[SamplingParams]:
    by_limit: dict[int, SamplingParams] = {}
    samplings = []
    for prompt in prompts:
        default = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
        limit = max_output_tokens(len(prompt), request.max_tokens, default, loaded.engine.info, param="prompt")
        if limit not in by_limit:
            by_limit[limit] = request.sampling(
                max_tokens=limit,
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if request.echo else None,
            )
        samplings.append(by_limit[limit])
    return samplings


@dataclass
class _CompletionResponder:
    """Sends one response, whole or streamed, from the same parts."""

    tokenizer: Tokenizer
    request: CompletionRequest
    choices: list[_ChoiceState]
    n: int
    response_id: str
    model: str
    created: int

    async def respond(self, generation: Generation, exchange: HttpExchange) -> None:
        """Send one JSON response when all sequences have ended."""
        ends: dict[int, OutputDelta] = {}

        async def on_delta(index: int, delta: OutputDelta) -> None:
            part, choice = self._new_part(index, delta), self.choices[index]
            choice.text.append(part.text)
            choice.token_ids += delta.token_ids
            if part.logprobs is not None:
                if choice.logprobs is None:
                    choice.logprobs = part.logprobs
                else:
                    extend(choice.logprobs, part.logprobs)
            if delta.finish_reason is not None:
                ends[index] = delta

        usages = await generation.run(on_delta)
        choices = [
            CompletionChoice(
                index=choice.index,
                text="".join(choice.text),
                logprobs=choice.logprobs,
                finish_reason=_finish_reason(ends[choice.index]),
                stop_reason=ends[choice.index].stop_reason,
                matched_stop=ends[choice.index].matched_stop,
                token_ids=choice.token_ids if self.request.return_token_ids else msgspec.UNSET,
                prompt_token_ids=choice.prompt_ids if self.request.return_token_ids else msgspec.UNSET,
            )
            for choice in self.choices
        ]
        await exchange.respond(
            CompletionResponse(
                id=self.response_id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=total_usage(usages, self.n),
            )
        )

    async def stream(self, generation: Generation, exchange: HttpExchange) -> None:
        """Send server-sent events as tokens arrive."""
        head = {"id": self.response_id, "object": "text_completion", "created": self.created, "model": self.model}
        encoder = ChunkEncoder(
            head | {"system_fingerprint": None},
            num_choices=len(self.choices),
            before='"text":',
            after=',"logprobs":null,"finish_reason":null',
            include_usage=self.request.include_usage,
            prompt_tokens=[len(choice.prompt_ids) for choice in self.choices]
            if self.request.continuous_usage
            else None,
        )
        plain = self.request.logprobs is None and not self.request.return_token_ids
        out = EventStream(exchange.send)

        async def on_delta(index: int, delta: OutputDelta) -> None:
            encoder.count_tokens(index, delta)
            if plain and delta.finish_reason is None and self.choices[index].opened:
                if delta.text:
                    await out.write(encoder.text_chunk(index, delta.text))
                return
            part = self._new_part(index, delta)
            if part.text or part.logprobs or part.token_ids or part.prompt_token_ids or part.finish_reason:
                await out.write(encoder.choice_chunk(part))

        async with out:
            usages = await generation.run(on_delta)
            end = encoder.usage_chunk(total_usage(usages, self.n)) if self.request.include_usage else b""
            await out.finish(end + DONE)

    def _new_part(self, index: int, delta: OutputDelta) -> CompletionChoice:
        """Return the new part of a choice; the first part also has the echoed prompt."""
        choice = self.choices[index]
        first, choice.opened = not choice.opened, True
        ids = self.request.return_token_ids
        return CompletionChoice(
            index=index,
            text=choice.echoed + delta.text if first else delta.text,
            logprobs=self._logprobs(choice, delta, first=first),
            finish_reason=None if delta.finish_reason is None else _finish_reason(delta),
            stop_reason=delta.stop_reason,
            matched_stop=delta.matched_stop,
            token_ids=delta.token_ids if ids else msgspec.UNSET,
            prompt_token_ids=choice.prompt_ids if ids and first else msgspec.UNSET,
        )

    def _logprobs(self, choice: _ChoiceState, delta: OutputDelta, *, first: bool) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        choice.num_chars += len(delta.text)
        choice.held += zip(delta.logprobs, delta.text_offsets, strict=True)
        num_ready = len(choice.held)
        if delta.finish_reason is None:
            num_ready = sum(offset <= choice.num_chars for _, offset in choice.held)
        ready, choice.held = choice.held[:num_ready], choice.held[num_ready:]
        offsets = [len(choice.echoed) + min(offset, choice.num_chars) for _, offset in ready]
        output = completion_logprobs(self.tokenizer, [entry for entry, _ in ready], offsets)
        if not (first and self.request.echo and delta.prompt_logprobs):
            return output if ready else None
        shaped = prompt_logprobs(self.tokenizer, choice.prompt_ids, delta.prompt_logprobs, choice.prompt_offsets)
        extend(shaped, output)
        return shaped


def _finish_reason(delta: OutputDelta) -> str:
    assert delta.finish_reason is not None
    return delta.finish_reason.value
