"""`/v1/chat/completions`: answers a conversation, whole or streamed. Owns the shape of its choices and encoder."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from jaxserve.api_types import StructuredOutputs, Usage
from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation.chat_messages import render_prompt, text_of
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.prompts import (
    check_grammar,
    check_prompt,
    encode_texts,
    engine_requests,
    max_output_tokens,
)
from jaxserve.server.generation.structured_fields import structured_outputs
from jaxserve.server.generation.tools import ToolUse, tool_use
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.sse import DONE, EventStream
from jaxserve.server.openai.answers import (
    AnswerPlan,
    AnswerState,
    Place,
    answer_grammar,
    place_in_reasoning,
    plan_answer,
)
from jaxserve.server.openai.chunks import ChunkEncoder
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.protocol import ChatRequest
from jaxserve.server.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    UsageInfo,
    total_usage,
)
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.grammars.formats import grammar_of
from jaxserve.text.output import OutputDelta
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_NOTHING = ChatDelta()


async def chat_completions(state: ServerState, exchange: HttpExchange, request: ChatRequest) -> None:
    """Answer one request."""
    loaded = state.require_loaded()
    request.check_supported()
    requested_limit, logprobs = request.max_output_tokens(), request.num_logprobs()
    tools = tool_use(request.tools, request.tool_choice, several=request.parallel_tool_calls is not False)
    prompt = await render_prompt(
        *(state, loaded, request.messages, request, None if tools is None else tools.shown, request.reasoning_effort)
    )
    if request.verbosity is not None:
        loaded.say_once("verbosity changes nothing here: ask for it in a message")
    place = place_in_reasoning(
        *(loaded.formats.thinking, prompt.text, text_of(request.messages[-1])),
        continues=bool(request.continue_final_message),
    )
    grammar = await _compile_grammar(state, loaded, tools, structured_outputs(request), place)
    # By default none are added, since a template writes its own special tokens.
    (ids,) = await encode_texts(
        state,
        loaded,
        [prompt.written],
        add_special_tokens=request.add_special_tokens is True,
        param="messages",
        encoder=prompt.encoder,
    )
    check_prompt(ids, loaded.engine.info, param="messages")
    limit = max_output_tokens(len(ids), requested_limit, None, loaded.engine.info, param="messages")
    sampling = request.sampling(max_tokens=limit, logprobs=logprobs)
    plan = plan_answer(
        loaded,
        tools,
        place,
        is_held=grammar != "",
        separates_reasoning=request.separate_reasoning is not False,
        shows_reasoning=request.include_reasoning is not False,
    )
    if plan.formats and loaded.formats.shows_special_tokens(loaded.tokenizer):
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    response_id = request.response_id("chatcmpl", exchange.request_id)
    requests = engine_requests(loaded, response_id, [ids], [sampling], [grammar], request)
    generation = Generation(state, loaded, requests, exchange.arrival)
    responder = _ChatResponder(
        *(loaded.tokenizer, request, plan, ids, sampling.n, response_id, state.model_name, int(time.time()))
    )
    with state.abortable((response_id, *request.client_ids, exchange.request_id), generation):
        await (responder.stream if request.stream else responder.respond)(generation, exchange)


async def _compile_grammar(
    state: ServerState,
    loaded: LoadedModel,
    tools: ToolUse | None,
    asked: tuple[str, StructuredOutputs] | None,
    place: Place,
) -> str:
    """Return the grammar of answers that begin at a place in their reasoning, or "".

    Raises `InvalidRequestError` naming the field at fault. An answer that must be a call needs no form.
    """
    field, outputs = asked if asked and not (tools and tools.required) else ("tools", None)
    if outputs is None and tools is None:
        return ""

    def compose(tools: ToolUse | None) -> str:
        form = "" if outputs is None else grammar_of(outputs)
        return answer_grammar(loaded, tools, form, place)

    try:
        return await check_grammar(state, loaded, lambda: compose(tools), param=field)
    except InvalidRequestError:
        loosened = None if tools is None else tools.loosened()
        if loosened is None:
            raise
    return await check_grammar(state, loaded, lambda: compose(loosened), param=field)


@dataclass
class _ChatResponder:
    """Sends one response, whole or streamed, from the same deltas."""

    tokenizer: Tokenizer
    request: ChatRequest
    plan: AnswerPlan
    prompt_ids: list[int]
    n: int
    response_id: str
    model: str
    created: int

    async def respond(self, generation: Generation, exchange: HttpExchange) -> None:
        """Send one JSON response when all sequences have ended."""
        deltas: list[list[OutputDelta]] = [[] for _ in range(self.n)]
        answers = [AnswerState(self.plan) for _ in range(self.n)]

        async def on_delta(index: int, delta: OutputDelta) -> None:
            deltas[index].append(delta)
            answers[index].push(delta)

        usages = await generation.run(on_delta)
        await exchange.respond(
            ChatResponse(
                id=self.response_id,
                created=self.created,
                model=self.model,
                choices=[
                    self._choice(index, parts, answer) for index, (parts, answer) in enumerate(zip(deltas, answers))
                ],
                usage=self._usage(usages, answers),
                prompt_token_ids=self.prompt_ids if self.request.return_token_ids else msgspec.UNSET,
            )
        )

    def _usage(self, usages: list[Usage], answers: list[AnswerState]) -> UsageInfo:
        reasoning = sum(answer.num_reasoning_tokens for answer in answers) if self.plan.reasons else None
        return total_usage(usages, self.n, reasoning)

    def _choice(self, index: int, parts: list[OutputDelta], answer: AnswerState) -> ChatChoice:
        end = parts[-1]
        assert end.finish_reason is not None
        logprobs = None
        if self.request.logprobs:
            logprobs = ChatLogprobs([entry for part in parts for entry in self._logprobs(part).content])
        return ChatChoice(
            index=index,
            message=answer.message(),
            logprobs=logprobs,
            finish_reason=answer.finish_reason(end.finish_reason),
            stop_reason=end.stop_reason,
            matched_stop=end.matched_stop,
            token_ids=[token for part in parts for token in part.token_ids]
            if self.request.return_token_ids
            else msgspec.UNSET,
        )

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs:
        return chat_logprobs(self.tokenizer, delta.logprobs)

    async def stream(self, generation: Generation, exchange: HttpExchange) -> None:
        """Send server-sent events: the role, then parts of the message as they arrive, then the finish reason."""
        head = {"id": self.response_id, "object": "chat.completion.chunk", "created": self.created, "model": self.model}
        encoder = ChunkEncoder(
            head | {"system_fingerprint": None},
            num_choices=self.n,
            before='"delta":{"content":',
            after='},"logprobs":null,"finish_reason":null',
            include_usage=self.request.include_usage,
            prompt_tokens=[len(self.prompt_ids)] * self.n if self.request.continuous_usage else None,
        )
        plain = not self.request.logprobs and not self.request.return_token_ids
        answers = [AnswerState(self.plan) for _ in range(self.n)]
        opened: set[int] = set()
        out = EventStream(exchange.send)

        async def on_delta(index: int, delta: OutputDelta) -> None:
            events = b""
            if index not in opened:
                opened.add(index)
                opening = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
                events = encoder.choice_chunk(opening, self.prompt_ids if self.request.return_token_ids else None)
            encoder.count_tokens(index, delta)
            answer = answers[index]
            added = answer.push(delta)
            if added.reasoning_content or added.tool_calls or delta.finish_reason is not None or not plain:
                if added != _NOTHING or delta.logprobs or delta.token_ids or delta.finish_reason is not None:
                    events += encoder.choice_chunk(self._chunk(index, delta, added, answer))
            elif added.content:
                events += encoder.text_chunk(index, added.content)
            if events:
                await out.write(events)

        async with out:
            usages = await generation.run(on_delta)
            end = encoder.usage_chunk(self._usage(usages, answers)) if self.request.include_usage else b""
            await out.finish(end + DONE)

    def _chunk(self, index: int, delta: OutputDelta, added: ChatDelta, answer: AnswerState) -> ChatChunkChoice:
        """Return the new part of a choice. Its last text has the finish reason, as vLLM's clients expect."""
        if added == _NOTHING and delta.finish_reason is None:
            added.content = ""
        choice = ChatChunkChoice(
            index=index,
            delta=added,
            logprobs=self._logprobs(delta) if self.request.logprobs and delta.logprobs else None,
            token_ids=delta.token_ids if self.request.return_token_ids else msgspec.UNSET,
        )
        if delta.finish_reason is not None:
            choice.finish_reason = answer.finish_reason(delta.finish_reason)
            choice.stop_reason, choice.matched_stop = delta.stop_reason, delta.matched_stop
        return choice
