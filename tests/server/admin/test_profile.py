from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.engine.core.profiling import Profiling
from tests.engine.fake_profiler import FakeProfiler
from tests.server.conftest import ServerUnderTest


@pytest.fixture
def profiler(server: ServerUnderTest, tmp_path: Path) -> FakeProfiler:
    profiler = FakeProfiler()
    server.engine.profiling = Profiling(profiler, str(tmp_path))
    return profiler


async def test_a_profile_is_started_and_stopped_without_a_body(
    server: ServerUnderTest, profiler: FakeProfiler, tmp_path: Path
):
    started = await server.http.post("/start_profile")
    assert started.status_code == 200
    folder = started.json()["output_dir"]
    assert Path(folder).is_relative_to(tmp_path)
    assert (await server.http.post("/start_profile")).status_code == 409
    assert (await server.http.post("/stop_profile")).json() == {"output_dir": folder, "num_steps": 0}
    again = await server.http.post("/stop_profile", json={})
    assert again.status_code == 409
    assert "no profile is running" in again.json()["error"]["message"]


async def test_requests_of_sglangs_clients(server: ServerUnderTest, profiler: FakeProfiler):
    body = {
        "output_dir": "mine", "num_steps": 5, "activities": ["CPU", "GPU"], "with_stack": True,
        "record_shapes": False, "profile_by_stage": False, "start_step": None,
    }  # fmt: skip
    answer = await server.http.post("/start_profile", json=body)
    assert answer.status_code == 200, answer.text
    assert profiler.calls == [("start mine", True)]
    assert server.engine.profiling._steps_left == 5


async def test_a_completion_body_from_vllm_bench_is_ignored(server: ServerUnderTest, profiler: FakeProfiler):
    completion = {
        "model": "tiny", "prompt": "Hello", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    chat = {"model": "another", "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 8}
    assert (await server.http.post("/start_profile", json=completion)).status_code == 200
    assert (await server.http.post("/stop_profile", json=chat)).status_code == 200
    assert [kind.split()[0] for kind, _ in profiler.calls] == ["start", "stop"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "tiny"}, "model"),
        ({"record_shapes": True}, "record_shapes"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"start_step": 3}, "start_step"),
        ({"activities": ["CPU"]}, "activities"),
        ({"activities": ["CPU", "GPU", "MEM"]}, "activities"),
        ({"output_dir": "/etc"}, "output_dir"),
        ({"num_steps": 0}, "num_steps"),
        ({"outputdir": "mine"}, "outputdir"),
    ],
    ids=str,
)
async def test_unsupported_options_are_refused(
    server: ServerUnderTest, profiler: FakeProfiler, body: dict[str, object], param: str
):
    answer = await server.http.post("/start_profile", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert profiler.calls == []


async def test_without_a_directory(server: ServerUnderTest):
    answer = await server.http.post("/start_profile")
    assert answer.status_code == 409
    assert "--profile-dir" in answer.json()["error"]["message"]


async def test_a_failing_profiler(server: ServerUnderTest, profiler: FakeProfiler):
    profiler.fail = "stop"
    await server.http.post("/start_profile")
    answer = await server.http.post("/stop_profile")
    assert answer.status_code == 500
    assert "no space left" in answer.json()["error"]["message"]


async def test_profiling_needs_the_key():
    from tests.server.conftest import over_asgi

    async with over_asgi(api_key="secret") as server:
        for path in ("/start_profile", "/stop_profile"):
            assert (await server.http.post(path)).status_code == 401
