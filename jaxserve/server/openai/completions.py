"""`/v1/completions`: prompts as text or ids, echoed or not, whole or streamed. Owns the shape of its choices."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from jaxserve.api_types import EngineInfo, SamplingParams, TokenLogprobs
from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import to_http
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.prompts import (
    check_length,
    check_number,
    check_prompt,
    encode,
    engine_requests,
    off_loop,
    output_limit,
)
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.http.sse import DONE, EventStream
from jaxserve.server.openai.chunks import Chunks
from jaxserve.server.openai.logprobs import completion_logprobs, extend, prompt_logprobs, prompt_offsets
from jaxserve.server.openai.protocol import CompletionRequest
from jaxserve.server.openai.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, total_usage
from jaxserve.server.server_state import Loaded, Serving
from jaxserve.text.output import OutputDelta

DEFAULT_MAX_TOKENS = 16


@dataclass
class _Choice:
    """A choice as it grows: what of it comes before the output, and what has come."""

    index: int
    prompt_ids: list[int]
    echoed: str
    prompt_offsets: list[int]
    # Tokens whose text is held back, as a stop string may yet cut it off, with where it would begin.
    held: list[tuple[TokenLogprobs, int]] = field(default_factory=list)
    num_chars: int = 0
    opened: bool = False
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None


async def completions(serving: Serving, exchange: Exchange, request: CompletionRequest) -> None:
    """Answers one request."""
    loaded = serving.require()
    request.refuse_unsupported()
    prompts, echoed, offsets = await _prompts(serving, loaded, request)
    samplings = _samplings(loaded, request, prompts)
    response_id = request.response_id("cmpl")
    requests = engine_requests(
        loaded,
        request.engine_name(response_id),
        prompts,
        samplings,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    n = samplings[0].n
    choices = [
        _Choice(index, engine_request.prompt_ids, echoed[index // n], offsets[index // n])
        for index, engine_request in enumerate(requests)
    ]
    generation = Generation(serving, loaded, requests, exchange.arrival)
    answer = _Answer(loaded, request, choices, n, response_id, serving.model_name)
    with serving.abortable((response_id, *request.names, exchange.request_id), generation):
        if request.stream:
            await answer.stream(generation, exchange)
        else:
            await answer.whole(generation, exchange)


async def _prompts(
    serving: Serving, loaded: Loaded, request: CompletionRequest
) -> tuple[list[list[int]], list[str], list[list[int]]]:
    """The ids of each prompt, the text that `echo` puts before each output, and where its tokens begin in that."""
    info = loaded.engine.info
    texts, ids = _split(request, info)
    add_special_tokens = request.add_special_tokens is not False
    if texts:
        ids = await encode(serving, loaded, texts, add_special_tokens=add_special_tokens, param="prompt")
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

    echoed, offsets = await off_loop(serving, sum(map(len, texts or ids)), echo)
    return ids, echoed, offsets


def _split(request: CompletionRequest, info: EngineInfo) -> tuple[list[str], list[list[int]]]:
    """The prompts as texts or as ids; one of the two lists is empty. A list's length is checked before its items."""
    prompt = request.prompt
    if isinstance(prompt, str):
        check_number(1, request.n)
        return [prompt], []
    if not prompt:
        raise InvalidRequestError("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        check_number(1, request.n)
        check_length(len(prompt), info, param="prompt")
    else:
        check_number(len(prompt), request.n)
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, list)]
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(prompt) not in (len(texts), len(ids), len(tokens)):
        raise InvalidRequestError("prompt mixes texts and token ids; send all of one kind", param="prompt")
    return (texts, []) if texts else ([], [tokens] if tokens else ids)


def _samplings(loaded: Loaded, request: CompletionRequest, prompts: list[list[int]]) -> list[SamplingParams]:
    by_limit: dict[int, SamplingParams] = {}
    samplings = []
    for prompt in prompts:
        default = max(DEFAULT_MAX_TOKENS, request.min_tokens or 0)
        limit = output_limit(len(prompt), request.max_tokens, default, loaded.engine.info, param="prompt")
        if limit not in by_limit:
            by_limit[limit] = request.sampling(
                max_tokens=limit,
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if request.echo else None,
            )
        samplings.append(by_limit[limit])
    return samplings


class _Answer:
    """One response, whole or streamed, from the same pieces."""

    def __init__(
        self, loaded: Loaded, request: CompletionRequest, choices: list[_Choice], n: int, response_id: str, model: str
    ) -> None:
        self._tokenizer = loaded.tokenizer
        self._request = request
        self._choices = choices
        self._n = n
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._plain = request.logprobs is None and not request.return_token_ids

    async def whole(self, generation: Generation, exchange: Exchange) -> None:
        """One JSON response when all has come."""
        ends: dict[int, OutputDelta] = {}

        async def emit(index: int, delta: OutputDelta) -> None:
            piece, choice = self._piece(index, delta), self._choices[index]
            choice.text.append(piece.text)
            choice.token_ids += delta.token_ids
            if piece.logprobs is not None:
                if choice.logprobs is None:
                    choice.logprobs = piece.logprobs
                else:
                    extend(choice.logprobs, piece.logprobs)
            if delta.finish_reason is not None:
                ends[index] = delta

        usages = await generation.run(emit)
        choices = [
            CompletionChoice(
                index=choice.index,
                text="".join(choice.text),
                logprobs=choice.logprobs,
                finish_reason=_reason(ends[choice.index]),
                stop_reason=ends[choice.index].stop_reason,
                matched_stop=ends[choice.index].matched_stop,
                token_ids=choice.token_ids if self._request.return_token_ids else msgspec.UNSET,
                prompt_token_ids=choice.prompt_ids if self._request.return_token_ids else msgspec.UNSET,
            )
            for choice in self._choices
        ]
        await exchange.respond(
            CompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=total_usage(usages, self._n),
            )
        )

    async def stream(self, generation: Generation, exchange: Exchange) -> None:
        """Server-sent events as tokens come."""
        head = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        chunks = Chunks(
            head | {"system_fingerprint": None},
            num_choices=len(self._choices),
            before='"text":',
            after=',"logprobs":null,"finish_reason":null',
            include_usage=self._request.include_usage,
            prompt_tokens=[len(choice.prompt_ids) for choice in self._choices]
            if self._request.continuous_usage
            else None,
        )
        out = EventStream(exchange.send)

        async def emit(index: int, delta: OutputDelta) -> None:
            chunks.count(index, delta)
            if self._plain and delta.finish_reason is None and self._choices[index].opened:
                if delta.text:
                    await out.write(chunks.text(index, delta.text))
                return
            piece = self._piece(index, delta)
            if piece.text or piece.logprobs or piece.token_ids or piece.prompt_token_ids or piece.finish_reason:
                await out.write(chunks.choice(piece))

        try:
            usages = await generation.run(emit)
            end = chunks.usage(total_usage(usages, self._n)) if self._request.include_usage else b""
            await out.finish(end + DONE)
        except Exception as error:
            if not out.started:
                raise
            await out.fail(to_http(error))

    def _piece(self, index: int, delta: OutputDelta) -> CompletionChoice:
        """What is new of a choice; the first piece also brings what `echo` asked for."""
        choice = self._choices[index]
        first, choice.opened = not choice.opened, True
        ids = self._request.return_token_ids
        return CompletionChoice(
            index=index,
            text=choice.echoed + delta.text if first else delta.text,
            logprobs=self._logprobs(choice, delta, first=first),
            finish_reason=None if delta.finish_reason is None else _reason(delta),
            stop_reason=delta.stop_reason,
            matched_stop=delta.matched_stop,
            token_ids=delta.token_ids if ids else msgspec.UNSET,
            prompt_token_ids=choice.prompt_ids if ids and first else msgspec.UNSET,
        )

    def _logprobs(self, choice: _Choice, delta: OutputDelta, *, first: bool) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        choice.num_chars += len(delta.text)
        choice.held += zip(delta.logprobs, delta.text_offsets, strict=True)
        certain = len(choice.held)
        if delta.finish_reason is None:
            certain = sum(offset <= choice.num_chars for _, offset in choice.held)
        now, choice.held = choice.held[:certain], choice.held[certain:]
        offsets = [len(choice.echoed) + min(offset, choice.num_chars) for _, offset in now]
        output = completion_logprobs(self._tokenizer, [entry for entry, _ in now], offsets)
        if not (first and self._request.echo and delta.prompt_logprobs):
            return output if now else None
        shaped = prompt_logprobs(self._tokenizer, choice.prompt_ids, delta.prompt_logprobs, choice.prompt_offsets)
        extend(shaped, output)
        return shaped


def _reason(delta: OutputDelta) -> str:
    assert delta.finish_reason is not None
    return delta.finish_reason.value
