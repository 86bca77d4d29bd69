"""`/v1/chat/completions`: answers a conversation, whole or streamed. Owns the shape of its choices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxserve.api_types import EngineRequest, FinishReason
from jaxserve.server.generation.answers import AnswerPart, AnswerPlan
from jaxserve.server.generation.chat_tools import chat_tool_use
from jaxserve.server.generation.conversation import Conversation, prepare_answer
from jaxserve.server.generation.engine_requests import engine_requests
from jaxserve.server.generation.prompts import max_output_tokens
from jaxserve.server.generation.responder import ResponseChoice, TotalUsage, respond
from jaxserve.server.generation.structured_fields import structured_outputs
from jaxserve.server.generation.token_logprobs import token_logprobs
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.model_tasks import require_generating
from jaxserve.server.openai.chunks import OpenAIShape
from jaxserve.server.openai.protocol import ChatRequest
from jaxserve.server.openai.responses import (
    CallDelta,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    CustomCall,
    CustomDelta,
    CustomToolCall,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    usage_info,
)
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.answers.reader import Kind
from jaxserve.text.output import OutputDelta


async def chat_completions(state: ServerState, exchange: HttpExchange, request: ChatRequest) -> None:
    """Answer one request."""
    loaded = require_generating(state)
    requests, plan = await prepare(state, loaded, exchange, request)
    response_id = request.response_id("chatcmpl", exchange.request_id)
    shape = _ChatShape(state, loaded, request, plan, response_id, len(requests))
    names = (response_id, *request.client_ids)
    await respond(state, loaded, exchange, requests, shape, stream=bool(request.stream), ids=names, plan=plan)


async def prepare(
    state: ServerState, loaded: LoadedModel, exchange: HttpExchange, request: ChatRequest
) -> tuple[list[EngineRequest], AnswerPlan]:
    """Return what the engine is to compute, and how its answers are read. Raises `InvalidRequestError`."""
    request.check_supported()
    requested_limit, logprobs = request.max_output_tokens(), request.num_logprobs()
    tools = chat_tool_use(request.tools, request.tool_choice, several=request.parallel_tool_calls is not False)
    reasoning = request.reasoning_options()
    conversation = Conversation(
        request.messages,
        request,
        tools=tools,
        form=structured_outputs(request),
        reasoning_effort=reasoning.effort,
        add_special_tokens=request.add_special_tokens is True,
        separates_reasoning=request.separate_reasoning is not False,
        shows_reasoning=reasoning.exclude is not True,
        thinking_budget=reasoning.max_tokens,
        thinks=reasoning.enabled,
    )
    if request.verbosity is not None:
        loaded.say_once("verbosity changes nothing here: ask for it in a message")
    answer = await prepare_answer(state, loaded, conversation)
    limit = max_output_tokens(len(answer.ids), requested_limit, None, loaded, param="messages")
    sampling = request.sampling(loaded.sampling_defaults.options, max_tokens=limit, logprobs=logprobs)
    requests = engine_requests(
        loaded,
        request.response_id("chatcmpl", exchange.request_id),
        [answer.ids],
        [sampling],
        [answer.grammar],
        priority=request.priority,
        cache_salt=request.cache_salt,
        thinking=answer.thinking,
    )
    return requests, answer.plan


class _ChatShape(OpenAIShape):
    """The shape of a response: in a stream the role, then parts of the message, the last with the finish reason."""

    kind = "chat.completion.chunk"
    before = '"delta":{"content":'
    after = '},"logprobs":null,"finish_reason":null'

    def __init__(
        self, state: ServerState, loaded: LoadedModel, request: ChatRequest, plan: AnswerPlan, id: str, num_choices: int
    ) -> None:
        super().__init__(state, loaded, request, id, num_choices, logprobs=bool(request.logprobs))
        self._request = request
        self._plan = plan

    def opening(self, choice: ResponseChoice) -> bytes:
        """Return the chunk with the role."""
        shaped = ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))
        return self.choice_chunk(choice, shaped, with_prompt=bool(self._request.return_token_ids))

    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        """Return a chunk, or nothing."""
        if self.plain and delta.finish_reason is None:
            if not parts:
                return b""
            if len(parts) == 1 and parts[0].kind == "content":
                return self.text_chunk(choice, parts[0].text)
        if parts or delta.logprobs or delta.token_ids or delta.finish_reason is not None:
            return self.choice_chunk(choice, self._chunk(choice, delta, parts))
        return b""

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> ChatResponse:
        """Return the whole response."""
        return ChatResponse(
            **self.head,
            choices=[self._choice(choice, choice.output, choice.parts) for choice in choices],
            usage=usage_info(usage),
            prompt_token_ids=choices[0].prompt_ids if self._request.return_token_ids else msgspec.UNSET,
        )

    def _choice(self, choice: ResponseChoice, end: OutputDelta, parts: Sequence[AnswerPart]) -> ChatChoice:
        calls = [part for part in parts if part.kind == "call"]
        content, reasoning = _text(parts, "content"), _text(parts, "reasoning")
        message = ChatMessage("assistant", content or (None if calls or reasoning else ""))
        if self._plan.reasons and self._plan.shows_reasoning:
            message.reasoning_content = reasoning
        if calls:
            given = {part.call: part.text for part in parts if part.kind in ("arguments", "input")}
            message.tool_calls = [_call(part, given.get(part.call, "")) for part in calls]
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=ChatLogprobs(token_logprobs(self.tokenizer, end.logprobs)) if self._request.logprobs else None,
            finish_reason=_finish_reason(choice, end),
            stop_reason=end.stop_reason,
            matched_stop=end.matched_stop,
            token_ids=end.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )

    def _chunk(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> ChatChunkChoice:
        """Return the new part of a choice. Its last text has the finish reason, as vLLM's clients expect."""
        shaped = ChatChunkChoice(
            index=choice.index,
            delta=_chat_delta(parts) if parts or delta.finish_reason is not None else ChatDelta(content=""),
            logprobs=ChatLogprobs(token_logprobs(self.tokenizer, delta.logprobs)) if delta.logprobs else None,
            token_ids=delta.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )
        if delta.finish_reason is not None:
            shaped.finish_reason = _finish_reason(choice, delta)
            shaped.stop_reason, shaped.matched_stop = delta.stop_reason, delta.matched_stop
        return shaped


def _call(part: AnswerPart, given: str) -> ToolCall | CustomToolCall:
    if part.is_custom:
        return CustomToolCall(part.call_id, CustomCall(part.text, given))
    return ToolCall(part.call_id, FunctionCall(part.text, given))


def _chat_delta(parts: Sequence[AnswerPart]) -> ChatDelta:
    """Return parts of an answer as parts of a message."""
    calls: list[CallDelta] = []
    for part in parts:
        if part.kind == "call" and part.is_custom:
            calls.append(CallDelta(part.call, custom=CustomDelta("", part.text), id=part.call_id, type="custom"))
        elif part.kind == "call":
            calls.append(CallDelta(part.call, FunctionDelta("", part.text), id=part.call_id, type="function"))
        elif part.kind in ("arguments", "input"):
            if not calls or calls[-1].index != part.call:
                is_custom = part.kind == "input"
                calls.append(
                    CallDelta(part.call, custom=CustomDelta(""))
                    if is_custom
                    else CallDelta(part.call, FunctionDelta(""))
                )
            if calls[-1].custom:
                calls[-1].custom.input += part.text
            elif calls[-1].function:
                calls[-1].function.arguments += part.text
    content, reasoning = _text(parts, "content"), _text(parts, "reasoning")
    return ChatDelta(content=content, reasoning_content=reasoning, tool_calls=calls or None)


def _text(parts: Sequence[AnswerPart], kind: Kind) -> str | None:
    texts = [part.text for part in parts if part.kind == kind]
    return "".join(texts) if texts else None


def _finish_reason(choice: ResponseChoice, end: OutputDelta) -> str:
    """Return why an answer ended, as OpenAI says it."""
    assert end.finish_reason is not None
    asks = choice.reader is not None and choice.reader.asks_for_calls
    return "tool_calls" if asks and end.finish_reason is FinishReason.STOP else end.finish_reason.value
