"""The lines of `--log-requests`, on every route that generates or pools."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api_types import EngineRequest
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.serve import serve
from tests.server.conftest import ServerUnderTest, over_asgi, over_socket
from tests.server.fake_engine import QUEUE_FULL, alphabet_rule
from tests.server.http.test_disconnect import submitted
from tests.server.pooling.tasks import EMBED, POOLED, both, task_of

CHAT = {"messages": [{"role": "user", "content": "tell"}]}
GENERATED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "tell", "max_tokens": 3},
    "/v1/chat/completions": CHAT | {"max_tokens": 3},
    "/v1/messages": CHAT | {"max_tokens": 3},
    "/v1/responses": {"input": "tell", "max_output_tokens": 3},
    "/generate": {"text": "tell", "sampling_params": {"max_new_tokens": 3}},
}
SECRETS = {"authorization": "Bearer secret-key", "x-request-id": "mine"}


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of this process's file, as JSON."""
    [path] = folder.iterdir()
    assert str(os.getpid()) in path.name
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    return {"log_requests": True, "log_requests_format": "json", "log_requests_target": (str(folder),)} | others


async def post(server: ServerUnderTest, path: str, body: dict[str, Any], status: int = 200) -> None:
    response = await server.http.post(path, json=body, headers=SECRETS)
    assert response.status_code == status, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATED)
async def test_every_route_that_generates_has_two_lines(path: str, stream: bool, tmp_path: Path):
    async with over_asgi(
        engine={"cached_tokens": 2}, api_key="secret-key", **settings(tmp_path, log_requests_level=3)
    ) as server:
        await post(server, path, GENERATED[path] | {"stream": stream})
        [request] = server.engine.submitted
        decode = server.state.require_loaded().tokenizer.decode
        received, finished = lines_in(tmp_path)
        assert (received["event"], finished["event"]) == ("request.received", "request.finished")
        assert received["id"] == finished["id"]
        assert "mine" in received["id"]
        assert {line["request_id"] for line in (received, finished)} == {"mine"}
        assert (received["route"], received["stream"], received["n"], received["priority"]) == (path, stream, 1, None)
        assert received["prompt_tokens"] == len(request.prompt_ids)
        assert received["prompts"] == [decode(request.prompt_ids, skip_special_tokens=False)]
        assert received["sampling"]["max_tokens"] == 3
        assert finished["finish_reasons"] == ["length"]
        assert (finished["output_tokens"], finished["cached_tokens"]) == (3, 2)
        answer = bytes(itertools.islice(alphabet_rule(request), 3)).decode()
        assert finished["answers"] == [answer]
        assert finished["queue_seconds"] == 0.25
        assert 0 <= finished["first_token_seconds"] <= finished["total_seconds"]
        assert "error" not in finished
    assert "secret" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.parametrize("path", POOLED)
async def test_every_route_that_pools_has_two_lines(path: str, tmp_path: Path):
    async with over_asgi(task=task_of(path), **settings(tmp_path, log_requests_level=2)) as server:
        await post(server, path, POOLED[path])
        received, finished = lines_in(tmp_path)
        assert (received["route"], received["request_id"]) == (path, "mine")
        assert received["num_prompts"] == len(server.engine.submitted)
        assert received["prompt_tokens"] == sum(len(each.prompt_ids) for each in server.engine.submitted)
        assert any("a" in text for text in received["prompts"])
        assert finished["finish_reasons"] == ["stop"] * received["num_prompts"]
        assert not {"sampling", "answers", "first_token_seconds"} & (received | finished).keys()


async def test_levels_add_what_they_say(tmp_path: Path):
    added = [set(), {"sampling"}, {"prompts", "answers"}, set()]
    body = {"prompt": ["tell " * 700, "me"], "n": 2, "temperature": 0.5, "stop": "zz", "max_tokens": 9}
    seen: set[str] = set()
    for level, more in enumerate(added):
        folder = tmp_path / str(level)
        async with over_asgi(engine={"max_model_len": 9000}, **settings(folder, log_requests_level=level)) as server:
            await post(server, "/v1/completions", body)
        received, finished = lines_in(folder)
        keys = {*received, *finished}
        assert keys - seen == more if level else keys
        seen |= keys
        assert (received["num_prompts"], received["n"], len(finished["finish_reasons"])) == (2, 2, 4)
        assert (received["prompt_tokens"], finished["output_tokens"]) == (3502, 36)
        if level:
            assert received["sampling"] == {"temperature": 0.5, "stop": ["zz"], "max_tokens": 9, "n": 2}
        if level > 1:
            assert [len(text) for text in received["prompts"]] == [2048 if level == 2 else 3500, 2]


@pytest.mark.parametrize("level", [2, 3])
async def test_max_log_len_cuts_prompts_and_answers(level: int, tmp_path: Path):
    async with over_asgi(**settings(tmp_path, log_requests_level=level, max_log_len=3)) as server:
        await post(server, "/v1/completions", {"prompt": "tell med", "max_tokens": 9})
    received, finished = lines_in(tmp_path)
    assert [*received["prompts"], *finished["answers"]] == ["tel", "wxy"]


async def test_each_prompt_with_options_of_its_own_shows_them(tmp_path: Path):
    async with over_asgi(**settings(tmp_path)) as server:
        options = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "regex": "[a-z]+"}]
        await post(server, "/generate", {"text": ["a", "b"], "sampling_params": options, "rid": ["x", "y"]})
    [received, _] = lines_in(tmp_path)
    assert received["sampling"] == [{"max_tokens": 1}, {"max_tokens": 2, "grammar": True}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_is_the_end(stream: bool, tmp_path: Path):
    async with over_asgi(engine={"refuse": lambda _: QUEUE_FULL}, **settings(tmp_path)) as server:
        await post(server, "/v1/completions", {"prompt": "a", "n": 2, "stream": stream}, status=503)
    [_, finished] = lines_in(tmp_path)
    assert "error" in finished["finish_reasons"]
    assert "queue" in finished["error"]


async def test_a_failure_in_the_middle_of_a_stream_is_the_end(tmp_path: Path):
    async with over_socket(**settings(tmp_path)) as server:
        server.engine.hold()
        body = {"prompt": "a", "stream": True, "max_tokens": 5}
        asking = asyncio.ensure_future(server.http.post("/v1/completions", json=body))
        [name] = await submitted(server, 1)
        await server.engine.step()
        server.engine.fail(name, "page fault")
        assert (await asking).status_code == 200
    [_, finished] = lines_in(tmp_path)
    assert (finished["finish_reasons"], finished["output_tokens"]) == (["error"], 1)
    assert "page fault" in finished["error"]


@pytest.mark.parametrize(("path", "count"), [("/v1/completions", 1), ("/v1/embeddings", 2)])
async def test_a_client_that_hangs_up_is_the_end(path: str, count: int, tmp_path: Path):
    async with over_socket(task=both(EMBED), **settings(tmp_path)) as server:
        server.engine.hold()
        body = {"prompt": "a"} if path == "/v1/completions" else {"input": ["a", "b"]}
        asking = asyncio.ensure_future(server.http.post(path, json=body))
        await submitted(server, count)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await server.state.idle.wait()
    [_, finished] = lines_in(tmp_path)
    assert finished["finish_reasons"] == ["abort"] * count
    assert "disconnected" in finished["error"]


async def test_texts_go_to_stdout_one_line_each(capsys: pytest.CaptureFixture[str]):
    def rule(_: EngineRequest) -> bytes:
        return b"x\ny"

    async with over_asgi(
        engine={"rule": rule}, log_requests=True, log_requests_target=("stdout",), log_requests_level=2
    ) as server:
        prompt = "a\nb\u2028\x85\x9b"
        await post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 3, "request_id": "r\ns"})
    received, finished = capsys.readouterr().out.splitlines()
    assert 'Request received. id: "cmpl-r\\ns", request_id: "mine", route: "/v1/completions"' in received
    assert received.endswith('sampling: {"max_tokens": 3}, prompts: ["a\\nb\\u2028\\u0085\\u009b"]')
    assert "Request finished. " in finished
    assert finished.endswith('answers: ["x\\ny"]')


async def test_without_a_target_lines_are_in_the_log_whatever_its_level(caplog: pytest.LogCaptureFixture):
    own = logging.getLogger("jaxserve.requests")
    with caplog.at_level(logging.ERROR, "jaxserve"):
        caplog.handler.setLevel(logging.NOTSET)
        for more in ({}, {"log_requests": True}):
            async with over_asgi(**more) as server:
                await post(server, "/v1/completions", {"prompt": "a"})
                await post(server, "/tokenize", {"prompt": "a"})  # generates nothing
                await post(server, "/v1/completions", {"prompt": "a", "temperature": -1}, status=400)
            assert [record.name for record in caplog.records] == ([own.name] * 2 if more else [])
    own.setLevel(logging.NOTSET)


async def test_a_full_disk_fails_no_request_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with over_asgi(**settings(tmp_path)) as server:
        await post(server, "/v1/completions", {"prompt": "a"})
        [path] = tmp_path.iterdir()
        path.unlink()
        path.symlink_to("/dev/full")
        for _ in range(3):
            await post(server, "/v1/completions", {"prompt": "a"})
        [record] = caplog.records
        assert "No space left" in record.getMessage()
        path.unlink()
        await post(server, "/v1/completions", {"prompt": "a"})
        assert len(lines_in(tmp_path)) == 2, "it writes again when it can"


async def test_a_broken_stdout_fails_no_request_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    class Broken(io.BytesIO):
        def write(self, _: object) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    async with over_asgi(log_requests=True, log_requests_target=("stdout",), log_requests_level=2) as server:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Broken()))
        await post(server, "/v1/completions", {"prompt": "secret"})
        [record] = caplog.records
        assert "stdout can't be written: [Errno 32] Broken pipe" in record.getMessage()
        assert "secret" not in capsys.readouterr().err


async def test_stdout_takes_any_character_whatever_its_encoding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    async with over_asgi(log_requests=True, log_requests_target=("stdout",), log_requests_level=2) as server:
        await post(server, "/v1/completions", {"prompt": "wörld"})
    assert 'prompts: ["wörld"]' in written.getvalue().decode()
    assert not caplog.records


@pytest.mark.parametrize("processes", [1, 2])
def test_a_folder_that_cannot_be_written_ends_the_start(processes: int, tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    config = ServerConfig(
        port=0, log_requests=True, log_requests_target=(str(file / "logs"),), api_server_count=processes
    )
    with pytest.raises(ConfigError, match=f"--log-requests-target {file}.*can't be written"):
        serve(EngineConfig(), config)


@pytest.mark.parametrize(
    "given",
    [{"log_requests_level": 2}, {"log_requests_format": "json"}, {"log_requests_target": ("x",)}, {"max_log_len": 1}],
)
def test_what_is_logged_of_requests_needs_log_requests(given: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}.* need log_requests"):
        ServerConfig(**given)
