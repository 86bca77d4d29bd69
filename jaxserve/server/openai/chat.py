"""`/v1/chat/completions`: a conversation through the model's template, answered whole or streamed.

Owns the shape of its choices and chunks.
"""

from __future__ import annotations

import time

import msgspec

from jaxserve.server.errors import to_http
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.prompts import check_prompt, encode, engine_requests, output_limit
from jaxserve.server.http.bodies import Exchange
from jaxserve.server.http.sse import DONE, EventStream
from jaxserve.server.openai.chat_messages import render
from jaxserve.server.openai.chunks import Chunks
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.protocol import ChatRequest
from jaxserve.server.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    total_usage,
)
from jaxserve.server.server_state import Loaded, Serving
from jaxserve.text.output import OutputDelta


async def chat_completions(serving: Serving, exchange: Exchange, request: ChatRequest) -> None:
    """Answers one request."""
    loaded = serving.require()
    request.refuse_unsupported()
    asked, logprobs = request.output_limit(), request.num_logprobs()
    text = await render(serving, loaded, request)
    # A template writes its own special tokens.
    (ids,) = await encode(
        serving, loaded, [text], add_special_tokens=request.add_special_tokens is True, param="messages"
    )
    check_prompt(ids, loaded.engine.info, param="messages")
    limit = output_limit(len(ids), asked, None, loaded.engine.info, param="messages")
    sampling = request.sampling(max_tokens=limit, logprobs=logprobs)
    response_id = request.response_id("chatcmpl")
    requests = engine_requests(
        loaded,
        request.engine_name(response_id),
        [ids],
        [sampling],
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    generation = Generation(serving, loaded, requests, exchange.arrival)
    answer = _Answer(loaded, request, ids, sampling.n, response_id, serving.model_name)
    with serving.abortable((response_id, *request.names, exchange.request_id), generation):
        if request.stream:
            await answer.stream(generation, exchange)
        else:
            await answer.whole(generation, exchange)


class _Answer:
    """One response, whole or streamed, from the same deltas."""

    def __init__(
        self, loaded: Loaded, request: ChatRequest, ids: list[int], n: int, response_id: str, model: str
    ) -> None:
        self._tokenizer = loaded.tokenizer
        self._request = request
        self._prompt_ids = ids
        self._n = n
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._plain = not request.logprobs and not request.return_token_ids

    async def whole(self, generation: Generation, exchange: Exchange) -> None:
        """One JSON response when all has come."""
        deltas: list[list[OutputDelta]] = [[] for _ in range(self._n)]

        async def emit(index: int, delta: OutputDelta) -> None:
            deltas[index].append(delta)

        usages = await generation.run(emit)
        await exchange.respond(
            ChatResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._choice(index, parts) for index, parts in enumerate(deltas)],
                usage=total_usage(usages, self._n),
                prompt_token_ids=self._prompt_ids if self._request.return_token_ids else msgspec.UNSET,
            )
        )

    def _choice(self, index: int, parts: list[OutputDelta]) -> ChatChoice:
        end = parts[-1]
        assert end.finish_reason is not None
        logprobs = None
        if self._request.logprobs:
            logprobs = ChatLogprobs([entry for part in parts for entry in self._logprobs(part).content])
        return ChatChoice(
            index=index,
            message=ChatMessage("assistant", "".join(part.text for part in parts)),
            logprobs=logprobs,
            finish_reason=end.finish_reason.value,
            stop_reason=end.stop_reason,
            matched_stop=end.matched_stop,
            token_ids=[token for part in parts for token in part.token_ids]
            if self._request.return_token_ids
            else msgspec.UNSET,
        )

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs:
        return chat_logprobs(self._tokenizer, delta.logprobs)

    async def stream(self, generation: Generation, exchange: Exchange) -> None:
        """Server-sent events: the role, then text as it comes, then the reason why it ended."""
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
        chunks = Chunks(
            head | {"system_fingerprint": None},
            num_choices=self._n,
            before='"delta":{"content":',
            after='},"logprobs":null,"finish_reason":null',
            include_usage=self._request.include_usage,
            prompt_tokens=[len(self._prompt_ids)] * self._n if self._request.continuous_usage else None,
        )
        out = EventStream(exchange.send)
        opened: set[int] = set()

        async def emit(index: int, delta: OutputDelta) -> None:
            events = b""
            if index not in opened:
                opened.add(index)
                opening = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
                events = chunks.choice(opening, self._prompt_ids if self._request.return_token_ids else None)
            chunks.count(index, delta)
            if delta.finish_reason is not None or not self._plain:
                if delta.text or delta.logprobs or delta.token_ids or delta.finish_reason is not None:
                    events += chunks.choice(self._content(index, delta))
            elif delta.text:
                events += chunks.text(index, delta.text)
            if events:
                await out.write(events)

        try:
            usages = await generation.run(emit)
            end = chunks.usage(total_usage(usages, self._n)) if self._request.include_usage else b""
            await out.finish(end + DONE)
        except Exception as error:
            if not out.started:
                raise
            await out.fail(to_http(error))

    def _content(self, index: int, delta: OutputDelta) -> ChatChunkChoice:
        """What is new of a choice; with its last text comes how it ended, as vLLM's clients want it."""
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=delta.text) if delta.text or delta.finish_reason is None else ChatDelta(),
            logprobs=self._logprobs(delta) if self._request.logprobs and delta.logprobs else None,
            token_ids=delta.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason.value
            choice.stop_reason, choice.matched_stop = delta.stop_reason, delta.matched_stop
        return choice
