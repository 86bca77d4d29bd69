"""Several API processes of one server, over a fake device: real processes, sockets and clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fake_server import FakeServer, running
from tests.server.http.test_tls import FIRST, SECOND, put, trusting

pytestmark = pytest.mark.process

FLAGS = ["--api-server-count", "2", "--max-running-requests", "16", "--context-length", "4096"]
REPLICAS = ["--device", "cpu", "--dp-mode", "replicas", "--dp-size"]
LONG = {"prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running(*FLAGS, "--metrics-prefix", "vllm") as server:
        yield server


class Stream:
    """A stream on a connection of its own: its id, the process that holds it, and what came after its first event."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._body = LONG | options
        self.id = ""
        self.reasons: list[str] = []

    async def __aenter__(self) -> Stream:
        self._client = httpx.AsyncClient(base_url=self._url, timeout=60)
        self._context = self._client.stream("POST", "/v1/completions", json=self._body)
        self._response = await self._context.__aenter__()
        assert self._response.status_code == 200
        self._lines: AsyncIterator[str] = self._response.aiter_lines()
        self._note(await anext(self._lines))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._context.__aexit__(None, None, None)
        await self._client.aclose()

    def _note(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            self.id = event.get("id", self.id)
            for choice in event.get("choices", ()):
                if choice["finish_reason"]:
                    self.reasons.append(choice["finish_reason"])
            if "error" in event:
                self.reasons.append("error")
        elif line == "data: [DONE]":
            self.reasons.append("done")

    async def end(self) -> list[str]:
        """Read to the end; a broken connection is an end too."""
        try:
            async for line in self._lines:
                self._note(line)
        except httpx.TransportError:
            self.reasons.append("broken")
        return self.reasons


async def ask(url: str, path: str, **body: Any) -> Any:
    """Ask on a new connection, so that the processes answer in turn."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await (http.post(path, json=body) if body else http.get(path))
        return answer.json() if "json" in answer.headers["content-type"] else answer.text


async def settled(url: str) -> dict[str, Any]:
    """What the server says of itself once no request runs."""
    while True:
        info: dict[str, Any] = await ask(url, "/server_info")
        if not info["stats"]["num_running"] + info["stats"]["num_waiting"] + info["open_requests"]:
            return info


async def test_both_serve_and_each_finds_the_requests_of_the_other(server: FakeServer) -> None:
    url = server.url
    async with Stream(url) as one, Stream(url) as other, Stream(url) as third:
        infos = [await ask(url, "/server_info") for _ in range(2)]
        for info in infos:
            assert info["open_requests"] == 3
            assert sorted(process["open_requests"] for process in info["api_processes"]) == [1, 2]
        # `one` and `third` are held by one process and `other` by the next, and so are the connections after them.
        for stream in (other, one):
            assert await ask(url, "/abort_request", rid=stream.id) == {"rid": stream.id, "aborted": 1}
            assert await stream.end() == ["abort", "done"]
            assert await ask(url, "/abort_request", rid=stream.id) == {"rid": stream.id, "aborted": 0}
        assert await ask(url, "/abort_request", abort_all=True) == {"rid": None, "aborted": 1}
        assert await third.end() == ["abort", "done"]
    info = await settled(url)
    assert info["stats"]["integrity_errors"] == []


async def test_a_response_that_one_keeps_is_found_by_the_other(server: FakeServer) -> None:
    url, path = server.url, "/v1/responses"
    async with Stream(url) as one, Stream(url) as other:  # one in each process
        first = await ask(url, path, input="one", max_output_tokens=2)
        for _ in range(2):  # in each process
            assert await ask(url, f"{path}/{first['id']}") == first
            second = await ask(url, path, input="two", max_output_tokens=2, previous_response_id=first["id"])
            listed = await ask(url, f"{path}/{second['id']}/input_items?order=asc")
            assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
            items = [{"type": "item_reference", "id": item["id"]} for item in listed["data"][:2]]
            again = await ask(url, path, input=[*items, {"role": "user", "content": "two"}], max_output_tokens=2)
            assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        found = re.search(r'num_stored_responses\{model_name="fake"\} (\S+)', await ask(url, "/metrics"))
        assert found is not None
        assert float(found[1]) == 5
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.delete(f"{path}/{first['id']}")).json()["deleted"] is True
        for _ in range(2):
            assert "not found" in (await ask(url, f"{path}/{first['id']}"))["error"]["message"]
    assert one.id != other.id


async def test_a_stream_that_one_writes_is_cancelled_by_the_other(server: FakeServer) -> None:
    url, path = server.url, "/v1/responses"
    body = {"input": "long", "max_output_tokens": 3000, "ignore_eos": True, "stream": True}
    for _ in range(2):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http, http.stream("POST", path, json=body) as stream:
            lines = stream.aiter_lines()
            name = json.loads([await anext(lines) for _ in range(2)][1][6:])["response"]["id"]
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                cancelled = (await client.post(f"{path}/{name}/cancel")).json()
            events = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
        assert (cancelled["id"], cancelled["status"]) == (name, "cancelled")
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")


async def test_metrics_are_those_of_all_processes(server: FakeServer) -> None:
    url = server.url
    before, *_ = [finished(await ask(url, "/metrics")) for _ in range(2)]
    await asyncio.gather(*(ask(url, "/v1/completions", prompt=[1, 2], max_tokens=2) for _ in range(8)))
    texts = [await ask(url, "/metrics") for _ in range(2)]
    assert [finished(text) - before for text in texts] == [8, 8]
    assert "process_cpu_seconds" not in texts[0], "which process answers changes"
    for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_bucket", "generation_tokens_total",
                 "time_per_output_token_seconds_sum", "http_requests_total", "num_requests_running"):  # fmt: skip
        found = [sorted(re.findall(rf"^jaxserve:{name}\{{.*", text, flags=re.M)) for text in texts]
        assert found[0]
        if name != "http_requests_total":
            theirs = [
                line.replace('engine="0",', "") for line in re.findall(rf"^vllm:({name}\{{.*)", texts[0], flags=re.M)
            ]
            assert sorted(theirs) == [line.removeprefix("jaxserve:") for line in found[0]]
        if "http" not in name:  # the first scrape counts in the second
            assert found[0] == found[1]


def finished(metrics: str) -> int:
    """How many sequences have ended."""
    return sum(map(int, re.findall(r"^jaxserve:request_success_total\{.*\} (\d+)\.0$", metrics, flags=re.M)))


async def test_a_killed_process_loses_only_its_own_requests_and_is_replaced(server: FakeServer) -> None:
    url = server.url
    counted = finished(await ask(url, "/metrics"))
    async with Stream(url) as one, Stream(url, max_tokens=1000) as other:
        [killed] = [process["pid"] for process in (await ask(url, "/server_info"))["api_processes"]][:1]
        os.kill(killed, signal.SIGKILL)
        ends = await asyncio.gather(one.end(), other.end())
    assert sorted(ends, key=len)[0] == ["broken"]
    assert ["length", "done"] in ends
    info = await settled(url)
    assert info["stats"]["integrity_errors"] == []
    server.until_logged("it is started again")
    while killed in (pids := [process["pid"] for process in info["api_processes"]]) or len(pids) < 2:
        info = await ask(url, "/server_info")
    answers = await asyncio.gather(*(ask(url, "/v1/completions", prompt=[1, 2], max_tokens=2) for _ in range(4)))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [2] * 4
    texts = [finished(await ask(url, "/metrics")) for _ in range(2)]
    assert texts == [counted + 5] * 2, "what the killed process counted before is still counted"


async def test_sigterm_drains_all(server: FakeServer) -> None:
    async with Stream(server.url, max_tokens=600) as one, Stream(server.url, max_tokens=600) as other:
        server.process.send_signal(signal.SIGTERM)
        server.until_logged("API1] INFO Draining: 1 open requests")
        refused = await ask(server.url, "/v1/completions", prompt=[1], max_tokens=1)
        assert "shutting down" in refused["error"]["message"]
        assert await asyncio.gather(one.end(), other.end()) == [["length", "done"]] * 2
    assert server.wait() == 0


async def test_the_engines_death_ends_every_request_and_the_server(tmp_path: Path) -> None:
    lines, log_config = tmp_path / "lines", tmp_path / "log.json"
    handlers = {
        "stderr": {"class": "logging.StreamHandler"},
        "file": {"class": "logging.FileHandler", "filename": str(lines), "formatter": "file"},
    }
    formatters = {"file": {"format": "%(process)d %(name)s %(message)s"}}
    loggers = {"jaxserve": {"handlers": [*handlers]}}
    log_config.write_text(
        json.dumps({"version": 1, "formatters": formatters, "handlers": handlers, "loggers": loggers})
    )
    log_flags = ("--log-config-file", str(log_config), "--log-requests", "--log-level-http", "warning")
    with running(*FLAGS, *REPLICAS, "2", *log_flags) as server:
        url = server.url
        for _ in range(2):
            assert await ask(url, "/flush_cache") == "Cache flushed: 0 pages given back.\n"
        async with Stream(url) as one, Stream(url) as other, Stream(url) as third:
            info = await ask(url, "/server_info")
            assert sorted(replica["stats"]["num_running"] for replica in info["replicas"]) == [1, 2]
            assert await ask(url, "/abort_request", rid=third.id) == {"rid": third.id, "aborted": 1}
            os.kill(info["replicas"][1]["pid"], signal.SIGKILL)
            assert await asyncio.gather(one.end(), other.end()) == [["error"]] * 2
        assert server.wait() == 1
        server.until_logged("The engine has ended: DP1: engine process ended with code -9")
    engines, apis = ({one["pid"] for one in info[name]} for name in ("replicas", "api_processes"))
    logged = [line.split(maxsplit=2) for line in lines.read_text().splitlines()]
    assert {int(pid) for pid, *_ in logged} == engines | apis | {server.process.pid}
    assert "jaxserve.access" not in {name for _, name, _ in logged}, "the file takes back no other setting"
    ended = [line for _, name, line in logged if name == "jaxserve.requests" and "finished" in line]
    assert len(ended) == 3
    assert sum('"error"' in line and "code -9" in line for line in ended) == 2
    assert len({int(pid) for pid, name, _ in logged if name == "jaxserve.requests"} & apis) == 2


async def test_all_serve_tls_on_a_path_and_renew_its_certificate(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    files = put(FIRST, tmp_path)
    tls = ["--ssl-certfile", files["ssl_certfile"], "--ssl-keyfile", files["ssl_keyfile"], "--enable-ssl-refresh"]
    with running(*FLAGS, *tls, "--uds", path) as server:
        assert server.url == f"unix:{path}"
        for certificate in (FIRST, SECOND):
            if certificate is SECOND:
                put(SECOND, tmp_path)
                for name in ("API0", "API1"):
                    server.until_logged(f"{name}] INFO New connections use the changed certificate")
            for _ in range(2):  # in each process
                transport = httpx.AsyncHTTPTransport(uds=path, verify=trusting(certificate))
                async with httpx.AsyncClient(base_url="https://localhost", transport=transport, timeout=60) as http:
                    answer = await http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
                    assert answer.json()["usage"]["completion_tokens"] == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not os.path.exists(path)


def test_a_model_that_cannot_be_served_is_refused_once() -> None:
    with pytest.raises(AssertionError, match="Can't start") as failure, running(*FLAGS, *REPLICAS, "999"):
        pass
    assert str(failure.value).count("Can't start") == 1
