"""The sampling options that all APIs share come from `SamplingParams`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jaxserve.api_types import SHARED_OPTIONS, SamplingParams
from jaxserve.cli.bench.serve_flags import serve_parser
from jaxserve.cli.generate import parser
from jaxserve.config.sampling_defaults import SamplingDefaults
from jaxserve.errors import InvalidRequestError
from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.openai.protocol import ChatRequest, CompletionRequest
from jaxserve.server.responses_api.protocol import ResponsesRequest
from jaxserve.server.sglang.generate_protocol import GenerateSampling
from tests.server.conftest import ServerUnderTest

CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", SHARED_OPTIONS)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, MessagesRequest, ResponsesRequest, GenerateSampling])
def test_a_request_has_the_option_with_its_bounds(kind: type[msgspec.Struct], name: str):
    needed = {
        CompletionRequest: {"prompt": "a"},
        ChatRequest: {"messages": CHAT},
        MessagesRequest: {"messages": CHAT, "max_tokens": 1},
        ResponsesRequest: {"input": "a"},
        GenerateSampling: {},
    }[kind]
    for value in (-3, 1000):
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError:
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert({**needed, name: value}, kind)
        else:
            assert getattr(msgspec.convert({**needed, name: value}, kind), name) == value
    assert getattr(msgspec.convert(needed, kind), name) is None


@pytest.mark.parametrize("name", SHARED_OPTIONS)
def test_the_option_is_a_flag_that_is_left_out_by_default(name: str):
    for flags in (parser(), serve_parser("")):
        flag = f"--{name.replace('_', '-')}"
        assert getattr(flags.parse_args([flag, "1"]), name) == 1
        assert flag in flags.format_help()


DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "a"},
    "/generate": {"text": "a"},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions/render": {"messages": CHAT},
}


@pytest.fixture
def defaults(server: ServerUnderTest) -> Callable[..., None]:
    """Give the server other defaults."""

    def change(**defaults: Any) -> None:
        loaded = server.state.require_loaded()
        server.state.set_loaded(dataclasses.replace(loaded, sampling_defaults=SamplingDefaults(**defaults)))

    return change


async def asked(server: ServerUnderTest, path: str, **fields: Any) -> tuple[SamplingParams, dict[str, Any]]:
    """Return what the engine got, and the response."""
    body = ROUTES[path] | ({"sampling_params": fields} if path == "/generate" else fields)
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    if not path.endswith("/render"):
        return server.engine.submitted[-1].sampling, answer
    [rendered] = answer if isinstance(answer, list) else [answer]
    return msgspec.convert(rendered["sampling_params"], SamplingParams), rendered


def options(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize("path", ROUTES)
async def test_options_that_a_request_does_not_name_are_the_defaults(server: ServerUnderTest, defaults, path: str):
    neutral = options(SamplingParams())
    for default in ({}, DEFAULTS):
        defaults(options=default)
        for fields in ({}, {"temperature": None, "top_k": None}):
            sampling, _ = await asked(server, path, **fields)
            assert options(sampling) == neutral | default
        own = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
        sampling, _ = await asked(server, path, **own)
        assert options(sampling) == neutral | default | own


async def test_a_response_says_which_options_hold(server: ServerUnderTest, defaults):
    defaults(options=DEFAULTS)
    for fields in ({}, {"temperature": 0.2}):
        _, answer = await asked(server, "/v1/responses", **fields)
        assert (answer["temperature"], answer["top_p"]) == (fields.get("temperature", 0.6), 0.9)


LIMITS = {
    "/generate": "max_new_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/chat/completions": "max_completion_tokens",
}


@pytest.mark.parametrize("path", [path for path in ROUTES if "render" not in path])
async def test_the_servers_limit_bounds_every_answer(server: ServerUnderTest, defaults, path: str):
    name = LIMITS.get(path, "max_tokens")
    defaults(max_tokens=2)
    for wanted in ({}, {name: 3}, {name: 10**6}):
        sampling, answer = await asked(server, path, **wanted)
        assert sampling.max_tokens == 2
    sampling, _ = await asked(server, path, **{name: 1})
    assert sampling.max_tokens == 1
    if path == "/v1/messages":
        assert answer["stop_reason"] == "max_tokens"
