from __future__ import annotations

import logging
from typing import Any

import openai
import pytest

from jaxserve.api_types import EngineRequest
from jaxserve.errors import (
    QUEUE_LIMITS,
    ContextLengthError,
    EngineDeadError,
    EngineUnresponsiveError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from jaxserve.server.errors import UnavailableError, request_error, to_http_error
from tests.server.conftest import ServerUnderTest, over_asgi, over_socket
from tests.server.fake_engine import QUEUE_FULL
from tests.server.tiny import VOCAB_SIZE


async def expect_error(
    server: ServerUnderTest, path: str = "/v1/completions", *, status: int = 400, **request: Any
) -> dict[str, Any]:
    response = await server.http.post(path, **request)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not server.engine.num_running
    return error


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "required"),
        ({"prompt": 3}, "prompt", "got `int`"),
        ({"prompt": None}, "prompt", "prompt"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "mixes"),
        ({"prompt": [[1]] * 1025, "n": 2}, "prompt", "2050 sequences"),
        ({"prompt": [1, -7]}, "prompt", "-7"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt", str(VOCAB_SIZE)),
        ({"prompt": [[1], [2, 10**30]]}, "prompt", str(10**30)),
        ({"prompt": [1.5]}, "prompt[0]", "float"),
        ({"max_tokens": "5"}, "max_tokens", "expected `int`, got `str`"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 10**30}, "prompt", "context length"),
        ({"max_tokens": True}, "max_tokens", "got `bool`"),
        ({"temperature": -0.5}, "temperature", "-0.5"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"temperature": 1000}, "temperature", "1000"),
        ({"top_p": 0}, "top_p", "> 0.0, got 0"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": -1}, "min_p", "-1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"frequency_penalty": 3}, "frequency_penalty", "3"),
        ({"n": 0}, "n", "0"),
        ({"n": 129}, "n", "129"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"seed": -(2**63) - 1}, "seed", str(-(2**63) - 1)),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "20"),
        ({"logprobs": 21}, "logprobs", "21"),
        ({"logprobs": -1}, "logprobs", "-1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "101"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", str(VOCAB_SIZE)),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias", "301"),
        ({"stop": ["a"] * 17}, "stop", "17"),
        ({"stop": ""}, "stop", 'length >= 1, got ""'),
        ({"stop": [1]}, "stop[0]", "got `int`"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"stop_token_ids": list(range(16))}, "stop_token_ids", "17"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids", "got 17 entries"),
        ({"best_of": 3}, "best_of", "n"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"priority": 1}, "priority", "--schedule-policy priority"),
        ({"priority": -1}, "priority", "schedules by fcfs"),
        ({"priority": 2**31}, "priority", str(2**31)),
        ({"priority": 1.5}, "priority", "float"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        ({"cache_salt": 5}, "cache_salt", "got `int`"),
        ({"guided_json": "{"}, "guided_json", "can't be used"),
        ({"guided_json": {}, "regex": "a"}, "regex", "one form"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "Unknown"),
        ({"stream": "yes"}, "stream", "got `str`"),
        ({"prompt": ["a"] * 2000, "n": 2}, "prompt", "4000"),
        ({"max_tokns": 3}, "max_tokns", "'max_tokens'"),
        ({"temprature": 3}, "temprature", "'temperature'"),
        ({"zzzzzz": 3}, "zzzzzz", "Unknown"),
    ],
)
async def test_a_wrong_field_is_named(server: ServerUnderTest, body: dict[str, Any], param: str, words: str):
    body = ({} if body == {} else {"prompt": "a"}) | body
    error = await expect_error(server, json=body)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} x', "trailing"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN and Infinity are not JSON"),
        (b'{"prompt": "a", "temperature": -Infinity}', "NaN and Infinity are not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b"[" * 1_000_000, "object"),
    ],
)
async def test_broken_json(server: ServerUnderTest, body: bytes, words: str):
    error = await expect_error(server, content=body)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"prompt": "a" * 513}, ["512", "513"]),
        ({"prompt": "a" * 512}, ["512", "513"]),
        ({"prompt": "a" * 512, "max_tokens": 0, "echo": True}, ["512 tokens, and it must leave room"]),
        ({"prompt": "a" * 500, "max_tokens": 20}, ["512", "520", "500", "20"]),
        ({"prompt": list(range(200)) * 2_000}, ["512", "400000"]),
        ({"prompt": "a" * 6_145}, ["512", "at least 513"]),
        ({"prompt": ["b", "a" * 10_000_000]}, ["512", "at least 833334"]),
    ],
)
async def test_context_length(server: ServerUnderTest, body: dict[str, Any], numbers: list[str]):
    error = await expect_error(server, json=body)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "maximum context length is" in error["message"]
    assert all(number in error["message"] for number in numbers)


async def test_a_text_longer_than_the_context_can_still_be_tokenized(server: ServerUnderTest):
    response = await server.http.post("/tokenize", json={"prompt": "a" * 400_000})
    assert response.json()["count"] == 400_000


async def test_the_length_of_a_stop_string_is_limited(server: ServerUnderTest):
    error = await expect_error(server, json={"prompt": "a", "stop": "a" * 4097})
    assert error["param"] == "stop"
    assert "4097" in error["message"]
    assert "4096" in error["message"]


async def test_a_prompt_one_short_of_the_context_can_be_scored(server: ServerUnderTest):
    response = await server.http.post(
        "/v1/completions", json={"prompt": "a" * 511, "max_tokens": 0, "echo": True, "logprobs": 0}
    )
    assert response.status_code == 200


async def test_long_texts_are_tokenized_on_a_thread(server: ServerUnderTest):
    async with over_asgi(engine={"max_model_len": 100_000}) as wide:
        response = await wide.http.post("/v1/completions", json={"prompt": "ab" * 20_000, "max_tokens": 1})
        assert response.json()["usage"]["prompt_tokens"] == 40_000


async def test_unknown_model(server: ServerUnderTest):
    error = await expect_error(server, status=404, json={"prompt": "a", "model": "other"})
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "other" in error["message"]
    assert "tiny" in error["message"]
    assert (await server.http.get("/v1/models/other")).status_code == 404


async def test_unknown_routes_and_methods(server: ServerUnderTest):
    error = await expect_error(server, "/v1/nothing", status=404)
    assert error["code"] == "not_found"
    error = await expect_error(server, "/v1/models", status=405)
    assert "GET" in error["message"]
    response = await server.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/generate", {"text": "a"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_503_and_says_when_to_return(
    route: str, body: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
):
    async with over_asgi(engine={"refuse": lambda _: QUEUE_FULL}) as server:
        body = {"model": "tiny", "stream": stream, **body}
        monkeypatch.setattr(server.state.refusals, "_clock", lambda: 5.0)
        server.state.refusals.tick()
        first, *later = [await server.http.post(route, json=body) for _ in range(71)]
        assert first.status_code == 503
        assert "8 requests are open and --max-num-queued-reqs is 8; try again in 1 s" in first.text
        assert ("overloaded_error" if route == "/v1/messages" else "queue_full") in first.text
        waits = [int(response.headers["retry-after"]) for response in [first, *later]]
        assert waits == sorted(waits)
        assert waits[-1] > 2, "they come back one after the other: at most 32 a second run"
        metrics = (await server.http.get("/metrics")).text
        assert 'jaxserve:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 71.0' in metrics


def test_the_text_of_a_full_queue_holds_all_that_a_server_needs():
    for setting in QUEUE_LIMITS:
        for num_sequences in (1, 3):
            error = QueueFullError(setting, -2, 7, num_sequences)
            read = QueueFullError.from_text(str(error))
            assert read is not None
            assert (read.setting, read.found, read.limit, str(read)) == (setting, -2, 7, str(error))
    assert QueueFullError.from_text("queue full of pages") is None


async def test_one_failed_sequence_fails_the_request_and_aborts_the_others(caplog: pytest.LogCaptureFixture):
    async with over_asgi(
        engine={"refuse": lambda request: "device on fire" if request.sample == 1 else None}
    ) as server:
        server.engine.hold()
        for stream in (False, True):
            server.engine.submitted.clear()
            server.engine.aborted.clear()
            with caplog.at_level(logging.ERROR, "jaxserve.server"):
                error = await expect_error(server, status=500, json={"prompt": "a", "n": 3, "stream": stream})
            assert "device on fire" in error["message"]
            assert error["type"] == "server_error"
            names = [request.request_id for request in server.engine.submitted if request.sample != 1]
            assert set(server.engine.aborted) == set(names)
    assert len(caplog.records) == 2


async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(live_server: ServerUnderTest):
    live_server.engine.hold()
    async with live_server.openai() as client:
        chunks = await _open_stream(live_server, client)
        live_server.engine.fail(live_server.engine.submitted[0].request_id, "page fault")
        with pytest.raises(openai.APIError, match="page fault"):
            await anext(chunks)


async def test_the_engines_death_fails_every_open_request(live_server: ServerUnderTest):
    live_server.engine.hold()
    async with live_server.openai() as client:
        chunks = await _open_stream(live_server, client)
        whole = client.completions.create(model="tiny", prompt="b")
        import asyncio

        task = asyncio.ensure_future(whole)
        await live_server.engine.wait_for(lambda: len(live_server.engine.submitted) == 2)
        live_server.engine.die("engine process ended with code -9")
        with pytest.raises(openai.APIError, match="code -9"):
            await anext(chunks)
        with pytest.raises(openai.InternalServerError, match="code -9") as caught:
            await task
        assert caught.value.status_code == 503
        with pytest.raises(openai.InternalServerError, match="code -9") as caught:
            await client.completions.create(model="tiny", prompt="b")
        assert caught.value.status_code == 503


async def _open_stream(live_server: ServerUnderTest, client: openai.AsyncOpenAI) -> Any:
    """Open a stream and read its first token."""
    import asyncio

    creating = asyncio.ensure_future(client.completions.create(model="tiny", prompt="a", stream=True))
    await live_server.engine.wait_for(lambda: len(live_server.engine.submitted) == 1)
    await live_server.engine.step()
    chunks = await creating
    assert (await anext(aiter(chunks))).choices[0].text
    return aiter(chunks)


async def test_openai_clients_errors(live_server: ServerUnderTest):
    async with live_server.openai() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="a", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt="a" * 600)
        assert long.value.code == "context_length_exceeded"


async def test_unexpected_errors_are_500_and_one_log_line(caplog: pytest.LogCaptureFixture):
    def broken(_: Any) -> str:
        raise ZeroDivisionError("secret")

    async with over_asgi(engine={"refuse": broken}) as server:
        with caplog.at_level(logging.INFO, "jaxserve"):
            error = await expect_error(server, status=500, json={"prompt": "a"})
    assert "secret" not in error["message"]
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info


@pytest.mark.parametrize("traced", [False, True])
async def test_with_log_error_stack_each_answered_error_has_its_traceback_once(
    traced: bool, caplog: pytest.LogCaptureFixture
):
    def refuse(request: EngineRequest) -> str | None:
        return {b"f": QUEUE_FULL, b"e": "device on fire"}.get(bytes(request.prompt_ids))

    wrong: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
        ("/v1/completions", {"prompt": "f", "stream": True}, 503),
        ("/v1/completions", {"prompt": "e"}, 500),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, 400),
        ("/v1/nothing", {}, 404),
    ]
    async with over_asgi(engine={"refuse": refuse}, log_error_stack=traced) as server:
        for path, body, status in wrong:
            caplog.clear()
            response = await server.http.post(path, json=body, headers={"x-request-id": "mine"})
            assert response.status_code == status
            assert [bool(record.exc_info) for record in caplog.records if record.levelno >= logging.ERROR] == (
                [True] if traced else [False] * (status == 500)
            )
            assert not traced or f"request mine is answered with the error {status}" in caplog.text
        caplog.clear()
        assert (await server.http.get("/v1/models/other")).status_code == 404
        assert ("Traceback" in caplog.text) == traced


async def test_with_log_error_stack_the_error_that_ends_a_stream_has_its_traceback(caplog: pytest.LogCaptureFixture):
    async with over_socket(log_error_stack=True) as server:
        server.engine.hold()
        async with server.openai() as client:
            chunks = await _open_stream(server, client)
            server.engine.fail(server.engine.submitted[0].request_id, "page fault")
            with pytest.raises(openai.APIError, match="page fault"):
                await anext(chunks)
    [error] = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert isinstance(error, RequestFailedError)


class TestBodyLimit:
    async def test_by_content_length(self, server: ServerUnderTest):
        error = await expect_error(server, status=413, content=b"x" * (16 * 2**20 + 1))
        assert "16777216" in error["message"]

    async def test_while_streaming(self, server: ServerUnderTest):
        async def parts():
            for _ in range(100):
                yield b" " * 2**18

        error = await expect_error(server, status=413, content=parts())
        assert error["code"] == "request_too_large"

    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_body_of_100_mb_is_refused_without_being_kept(self, chunked: bool):
        import tracemalloc

        async def parts():
            block = bytes(2**20)
            for _ in range(100):
                yield block

        async with over_socket(max_body_bytes=2**20) as live_server:
            tracemalloc.start()
            try:
                headers = {} if chunked else {"content-length": str(100 * 2**20)}
                response = await live_server.http.post("/v1/completions", content=parts(), headers=headers, timeout=60)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
            assert peak < 20 * 2**20
            # The server continues.
            assert (await live_server.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("x", param="p"), 400, None),
        (ContextLengthError("x", param="p", num_tokens=9), 400, "context_length_exceeded"),
        (request_error(QUEUE_FULL, engine_dead=False), 503, "queue_full"),
        (request_error(QUEUE_FULL, engine_dead=True), 503, "engine_dead"),
        (request_error("x", engine_dead=False), 500, "request_failed"),
        (QueueFullError("max_queued_requests", 3, 2), 503, "queue_full"),
        (EngineDeadError("x"), 503, "engine_dead"),
        (EngineUnresponsiveError("x"), 503, "engine_unresponsive"),
        (UnavailableError("x"), 503, "unavailable"),
        (RequestFailedError("x"), 500, "request_failed"),
        (ValueError("x"), 500, None),
    ],
)
def test_every_error_class_has_a_status(error: Exception, status: int, code: str | None):
    answer = to_http_error(error)
    assert (answer.status, answer.code) == (status, code)
