"""More requests than a server can run at once, over a fake device: priorities, a flush under load, and refusals."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.fake_server import serving, until

pytestmark = pytest.mark.process


def test_a_higher_priority_preempts_and_nothing_is_lost() -> None:
    flags = ["--max-running-requests", "2", "--context-length", "512", "--schedule-policy", "priority"]
    with serving(*flags) as url, httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(12) as pool:

        def ask(priority: int, max_tokens: int) -> httpx.Response:
            body = {"prompt": [1, 2, 3], "priority": priority, "max_tokens": max_tokens, "ignore_eos": True}
            return http.post("/v1/completions", json=body)

        low: list[Future[httpx.Response]] = [pool.submit(ask, 0, 400) for _ in range(8)]
        until(url, "jaxserve:num_requests_waiting", 6)
        assert ask(5, 3).status_code == 200
        assert not any(future.done() for future in low), "it did not wait for those that ran before it"
        preempted = httpx.get(f"{url}/server_info").json()["stats"]["num_preemptions"]
        assert preempted >= 1
        usages = [future.result().json()["usage"] for future in low]
    assert [usage["completion_tokens"] for usage in usages] == [400] * 8


def test_a_flush_under_load() -> None:
    with serving("--max-running-requests", "4") as url, ThreadPoolExecutor(8) as pool:
        prompt = list(range(64))
        body = {"prompt": prompt, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

        def ask() -> dict[str, Any]:
            answer: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
            return answer

        alone = ask()
        asked = [pool.submit(ask) for _ in range(8)]
        until(url, "jaxserve:num_requests_waiting", 1)
        for method in ("GET", "POST"):
            flushed = httpx.request(method, f"{url}/flush_cache")
            assert flushed.status_code == 200
            assert flushed.text.startswith("Cache flushed: ")
        answers = [future.result() for future in asked]
        assert {str(answer["choices"][0]["token_ids"]) for answer in answers} == {str(alone["choices"][0]["token_ids"])}
        stats = httpx.get(f"{url}/server_info").json()["stats"]
        assert stats["integrity_errors"] == []
        assert stats["num_running"] == 0
        assert stats["num_free_pages"] + stats["num_evictable_pages"] == stats["num_pages"]


def test_a_refused_client_waits_as_told_and_those_inside_lose_nothing() -> None:
    limits = ["--max-running-requests", "2", "--max-num-queued-reqs", "4", "--context-length", "2048"]
    with serving(*limits) as url, ThreadPoolExecutor(4) as pool, httpx.Client(base_url=url, timeout=120) as http:
        body = {"prompt": [1, 2, 3], "max_tokens": 1600, "ignore_eos": True}
        inside = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=120) for _ in range(4)]
        until(url, "jaxserve:num_requests_waiting", 2)
        for stream in (False, True):
            refused = http.post("/v1/completions", json=body | {"stream": stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) < 600
        never = http.post("/v1/completions", json=body | {"n": 5})
        assert "this one adds 5, and --max-num-queued-reqs is 4" in never.json()["error"]["message"]
        assert never.headers["retry-after"] == "600"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=100) as client:
            client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=3)
        counted = re.search(r'rejections_total\{.*reason="max_num_queued_reqs"\} (\S+)', http.get("/metrics").text)
        assert counted is not None
        assert float(counted[1]) >= 4, "the client came while all were inside"
        assert [future.result().json()["usage"]["completion_tokens"] for future in inside] == [1600] * 4
