"""Odd requests over HTTP to a real engine: the response is never a 500, and the engine keeps running."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import EngineClient
from jaxserve.server.admin.profile import StartProfileRequest
from jaxserve.server.anthropic.protocol import MessagesRequest
from jaxserve.server.openai.protocol import CompletionRequest
from jaxserve.server.pooling.protocol import (
    EmbeddingRequest,
    EncodeRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxserve.server.responses_api.protocol import ResponsesRequest
from jaxserve.server.sglang import tokenize
from jaxserve.server.sglang.generate_protocol import GenerateRequest, GenerateSampling
from tests.engine.fake_executor import VOCAB
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.pooling.tasks import EMBED, both

pytestmark = pytest.mark.process

ODD: list[Any] = [
    *(-1, 0, 1, 2**31, 2**32, -(2**63) - 1, 2**64, 10**23, 10**400, 1e308),
    *("", "a\0b", "\ud800", "x" * 5000, "../..", [], {}),
]
FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("/start_profile", {}, StartProfileRequest.__struct_fields__),
    ("/stop_profile", {}, ("x",)),
    ("/abort_request", {}, ("rid",)),
    ("/detokenize", {}, ("tokens",)),
    ("/tokenize", {"prompt": "a"}, tokenize.TokenizeRequest.__struct_fields__),
    ("/v1/completions", {"prompt": [5], "max_tokens": 2}, CompletionRequest.__struct_fields__),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        MessagesRequest.__struct_fields__,
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}, ResponsesRequest.__struct_fields__),
    ("/generate", {"input_ids": [5]}, GenerateRequest.__struct_fields__),
    ("/v1/embeddings", {"input": [5]}, EmbeddingRequest.__struct_fields__),
    ("/v1/rerank", {"query": "q", "documents": ["a"]}, RerankRequest.__struct_fields__),
    ("/v1/score", {"text_1": "q", "text_2": "a"}, ScoreRequest.__struct_fields__),
    ("/pooling", {"input": [5]}, PoolingRequest.__struct_fields__),
    ("/encode", {"input_ids": [5]}, EncodeRequest.__struct_fields__),
]

# This engine follows no grammars.
STRUCTURED = {
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
    *("json_schema", "regex", "ebnf", "structural_tag", "output_config", "output_format"),
}


def _bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies with an odd value in every field of every route, alone and in a list."""
    for odd in ODD:
        for path, always, names in FIELDS:
            for name in names:
                if name != "model" and name not in STRUCTURED:
                    yield path, always | {name: odd}
        for name in set(GenerateSampling.__struct_fields__) - STRUCTURED:
            yield "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, name: odd}}
        for path, name in (("/detokenize", "tokens"), ("/v1/completions", "prompt"), ("/generate", "input_ids")):
            yield path, {name: [5, odd]}
        yield "/v1/completions", {"prompt": [5], "stop_token_ids": [odd], "logit_bias": {"5": odd}}
    for folder in ("a\0b", "n" * 300, "/".join("n" * 1000)):
        yield "/start_profile", {"output_dir": folder}


async def _ask(server: ServerUnderTest, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    response = await server.http.post(path, content=content)
    assert response.status_code in (200, 400, 404), (path, body, response.text)


async def test_no_odd_request_ends_the_engine(tmp_path: Path):
    config = EngineConfig(
        model="fine", log_level="error", profile_dir=str(tmp_path), schedule_policy="priority", context_length=64
    )
    engine = await EngineClient.launch(config, module="tests.engine.fake_worker")
    assert engine.info.vocab_size == VOCAB
    try:
        async with over_asgi(task=both(EMBED, size=1)) as server:
            fake, loaded = server.engine, server.state.loaded
            object.__setattr__(loaded, "engine", engine)
            for path, body in _bodies():
                await _ask(server, path, body)
                await server.http.post("/stop_profile")
            assert (await engine.refresh_stats()).integrity_errors == ()
            assert not engine.on_death.done()
            assert (await server.http.get("/health")).status_code == 200
            await fake.shutdown()
    finally:
        await engine.shutdown()


async def test_an_unwritable_profile_folder_is_a_client_error(tmp_path: Path):
    (tmp_path / "taken").write_text("a file")
    os.symlink("loop", tmp_path / "loop")
    config = EngineConfig(model="fine", log_level="error", profile_dir=str(tmp_path))
    engine = await EngineClient.launch(config, module="tests.engine.fake_worker")
    try:
        async with over_asgi() as server:
            object.__setattr__(server.state.loaded, "engine", engine)
            for folder in ("taken", "taken/x", "n" * 300, "loop/x"):
                response = await server.http.post("/start_profile", json={"output_dir": folder})
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == "output_dir"
            assert (await server.http.post("/start_profile", json={"output_dir": "fine"})).status_code == 200
    finally:
        await engine.shutdown()
