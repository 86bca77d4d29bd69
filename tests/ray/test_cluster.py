"""Replicas on a cluster of two nodes: real processes of Ray and of ours, over a fake device that takes its time."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import fake_server
from tests.ray.cluster import RayCluster, running, until
from tests.tiny_model import tiny_settings

pytestmark = pytest.mark.process

SETTINGS = {"model": "slow", "device": "cpu", "max_running_requests": 16, "context_length": 4096}
UPDATED = {**SETTINGS, "max_running_requests": 4, "served_model_name": "updated"}
FLAGS = ["--device", "cpu", "--max-running-requests", "16", "--context-length", "4096"]
TURNS = [{"role": "user", "content": "Say something."}]
SHORT = {"max_tokens": 4, "ignore_eos": True}
# About a second.
MEDIUM = {"max_tokens": 30, "ignore_eos": True}
# Longer than any test waits.
LONG = {"prompt": "long", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running() as cluster:
        asyncio.run(cluster.deploy(SETTINGS, num_replicas=2))
        yield cluster


@pytest.fixture
async def http(cluster: RayCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=240) as http:
        yield http


def without_names(answer: Any) -> Any:
    """Return an answer without what differs each time."""
    if isinstance(answer, dict):
        varying = ("id", "item_id", "created", "created_at", "completed_at")
        return {name: without_names(value) for name, value in answer.items() if name not in varying}
    return [without_names(value) for value in answer] if isinstance(answer, list) else answer


def end_of(stream: str) -> str:
    """Return `[DONE]` or `error`, if a stream ends so."""
    *_, last = (line for line in stream.splitlines() if line.startswith("data: "))
    return "[DONE]" if last == "data: [DONE]" else "error" if "error" in json.loads(last[6:]) else "broken"


def story_of(stream: str) -> tuple[list[str], str]:
    """Return the kinds of a stream's events in their order, and all its texts as one: how they are cut is by chance."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    kinds = [event.get("type") or event["object"] for event in events]
    texts = re.findall(r'"(?:content|text|delta)":"((?:[^"\\]|\\.)*)"', stream)
    return [kind for kind, _ in itertools.groupby(kinds)], "".join(texts)


async def num_running(http: httpx.AsyncClient) -> dict[str, float]:
    """How many requests each replica runs."""
    return samples(await http.get("/metrics"), "jaxserve:num_requests_running")


def samples(answer: httpx.Response, name: str) -> dict[str, float]:
    """The values of a metric, by replica."""
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {one.labels["replica"]: one.value for family in families for one in family.samples if one.name == name}


def replica_processes(cluster: RayCluster) -> list[psutil.Process]:
    return cluster.processes("ray::ServeReplica:llm:engine")


class Load:
    """Clients that ask all the time, on connections of their own, and what they were answered.

    Half of them stream.
    """

    def __init__(self, url: str, num_clients: int = 8) -> None:
        self.statuses = Counter[int]()
        self.ends = Counter[str]()
        self._url = url
        self._is_over = False
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._ask(number % 2 == 0)) for number in range(num_clients)]

    async def _ask(self, streams: bool) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=240) as http:
            while not self._is_over:
                body = {"prompt": f"prompt {next(self._numbers)}", "stream": streams, **MEDIUM}
                answer = await http.post("/v1/completions", json=body)
                self.statuses[answer.status_code] += 1
                if streams and answer.status_code == 200:
                    self.ends[end_of(answer.text)] += 1
                elif answer.status_code == 200:
                    assert answer.json()["usage"]["completion_tokens"] == MEDIUM["max_tokens"]

    async def until_each_has_asked(self) -> None:
        """Return when as many more answers are there as there are clients."""
        before = self.statuses.total()
        await until(lambda: self.statuses.total() >= before + len(self._tasks))

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


async def test_answers_and_streams_are_those_of_a_server(http: httpx.AsyncClient) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "one", **SHORT}),
        ("/v1/chat/completions", {"messages": TURNS, **SHORT}),
        ("/v1/chat/completions", {"messages": TURNS, **SHORT, "stream": True}),
        ("/v1/messages", {"messages": TURNS, "model": "slow", "max_tokens": 4, "stream": True}),
        ("/v1/responses", {"input": "one", "max_output_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": "one", "max_tokens": -1}),
        ("/v1/messages", {"messages": TURNS}),
        ("/v1/none", {}),
        ("/health", {}),
        ("/v1/models", {}),
    ]
    with fake_server.serving(*FLAGS, model="slow") as url:
        async with httpx.AsyncClient(base_url=url, timeout=240) as alone:
            for path, body in asked:
                ours, theirs = [await (one.post(path, json=body) if body else one.get(path)) for one in (http, alone)]
                kind = theirs.headers.get("content-type", "")
                assert (ours.status_code, ours.headers.get("content-type", "")) == (theirs.status_code, kind), path
                if "event-stream" in kind:
                    assert story_of(ours.text) == story_of(theirs.text), path
                    assert len(story_of(ours.text)[1]) > 4
                elif "json" in kind:
                    assert without_names(ours.json()) == without_names(theirs.json()), path
                else:
                    assert ours.text == theirs.text


async def test_a_response_names_its_request_and_its_replica(http: httpx.AsyncClient) -> None:
    replicas = set(await num_running(http))
    answer = await http.post("/v1/completions", json={"prompt": "a", **SHORT}, headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    [name] = answer.headers.get_list("x-replica-id")
    assert name in replicas
    assert answer.json()["id"] == "cmpl-mine"
    assert (await http.get("/v1/models")).headers["x-request-id"]


async def test_a_hang_up_ends_a_stream_and_a_request_without_one(http: httpx.AsyncClient) -> None:
    async def running_are(number: int) -> bool:
        return sum((await num_running(http)).values()) == number

    async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        await until(lambda: running_are(1))
    await until(lambda: running_are(0))
    unstreamed = asyncio.create_task(http.post("/v1/completions", json=LONG))
    await until(lambda: running_are(1))
    unstreamed.cancel()
    await until(lambda: running_are(0))


async def test_a_response_that_a_replica_keeps_is_found_by_all(http: httpx.AsyncClient) -> None:
    body = {"input": "one", "max_output_tokens": 2}
    first = await http.post("/v1/responses", json=body)
    asked = await asyncio.gather(*(http.get(f"/v1/responses/{first.json()['id']}") for _ in range(12)))
    assert {answer.headers["x-replica-id"] for answer in asked} == set(await num_running(http))
    assert all(answer.json() == first.json() for answer in asked)
    follow = {**body, "input": "two", "previous_response_id": first.json()["id"]}
    answers = await asyncio.gather(*(http.post("/v1/responses", json=follow) for _ in range(12)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-replica-id"] for answer in answers}) == 2
    assert len({answer.json()["usage"]["input_tokens"] for answer in answers}) == 1
    assert (await http.get("/v1/responses/resp_none")).status_code == 404


async def test_metrics_are_those_of_both_replicas_and_stand_once(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    comments = [line for line in answer.text.splitlines() if line.startswith("# TYPE")]
    assert len(comments) == len(set(comments)) > 20
    lines = [line.rpartition(" ")[0] for line in answer.text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert len(samples(answer, "jaxserve:num_requests_running")) == 2


async def test_a_flush_reaches_both_replicas(http: httpx.AsyncClient) -> None:
    async def cached() -> dict[str, bool]:
        used = samples(await http.get("/metrics"), "jaxserve:num_evictable_tokens")
        return {replica: number > 0 for replica, number in used.items()}

    for letter in "abcd":
        await http.post("/v1/completions", json={"prompt": letter * 100, **SHORT})
    assert list((await cached()).values()) == [True, True]
    assert (await http.post("/flush_cache")).status_code == 200
    assert list((await cached()).values()) == [False, False]


async def test_a_shared_prefix_stays_on_a_replica_and_others_spread(http: httpx.AsyncClient) -> None:
    async def send(prefix: str, number: int) -> str:
        messages = [{"role": "system", "content": prefix * 512}, {"role": "user", "content": f"{number}"}]
        answer = await http.post("/v1/chat/completions", json={"messages": messages, **SHORT})
        return answer.headers["x-replica-id"]

    prefixes = "ghijklmn"
    first = {prefix: await send(prefix, 0) for prefix in prefixes}
    assert sorted(Counter(first.values()).values()) == [4, 4]
    for number in (1, 2):
        for prefix in reversed(prefixes):
            assert await send(prefix, number) == first[prefix]


async def test_ray_exposes_the_samples_of_both_replicas(cluster: RayCluster, http: httpx.AsyncClient) -> None:
    replicas = set(await num_running(http))

    async def are_there() -> bool:
        text = ""
        for port in cluster.call("metrics_ports"):
            text += (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        found = re.findall(r"^ray_jaxserve_num_requests_running\{(.*)\} ", text, flags=re.M)
        return {re.findall(r'\breplica="([^"]+)"', labels)[0].split("#")[-1] for labels in found} >= replicas

    await until(are_there)


@pytest.mark.parametrize("victim", ["replica", "engine"])
async def test_a_killed_process_loses_no_request_without_a_stream(
    cluster: RayCluster, http: httpx.AsyncClient, victim: str
) -> None:
    before = set(await num_running(http))
    load = Load(cluster.url)
    await load.until_each_has_asked()
    (replica_processes(cluster) if victim == "replica" else cluster.engines())[0].kill()

    async def is_replaced() -> bool:
        answer = await http.get("/metrics")
        return answer.status_code == 200 and len(set(samples(answer, "jaxserve:num_requests_running")) - before) == 1

    await until(is_replaced)
    await cluster.until_running(2)
    await load.until_each_has_asked()
    await load.end()
    assert set(load.statuses) == {200}
    assert set(load.ends) <= {"[DONE]", "error"}
    assert load.ends["error"] <= 4
    assert len(cluster.engines()) == 2


async def test_an_update_loses_no_request(cluster: RayCluster, http: httpx.AsyncClient) -> None:
    before = set(await num_running(http))
    load = Load(cluster.url)
    await load.until_each_has_asked()
    await cluster.deploy(UPDATED, num_replicas=2)
    await load.until_each_has_asked()
    await load.end()
    assert set(load.statuses) == {200}
    assert set(load.ends) == {"[DONE]"}
    assert not before & set(await num_running(http))
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == "updated"


async def test_replicas_follow_the_queue(cluster: RayCluster, http: httpx.AsyncClient) -> None:
    policy = {"policy_function": "jaxserve.ray.autoscaling:scale_on_queue"}
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "metrics_interval_s": 0.5, "look_back_period_s": 1}
    scaling = {"min_replicas": 1, "max_replicas": 2, "policy": policy, **delays}
    await cluster.deploy(UPDATED, autoscaling_config=scaling)
    await cluster.until_running(1)
    load = Load(cluster.url, 12)
    await cluster.until_running(2)
    await load.end()
    await cluster.until_running(1)
    assert set(load.statuses) == {200}
    assert set(load.ends) == {"[DONE]"}


@pytest.mark.grid
async def test_a_mesh_over_both_nodes_is_one_replica_and_ends_as_one(
    cluster: RayCluster, http: httpx.AsyncClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mesh = {"tp_size": 2, "nnodes": 2, "cuda_graph_bs": [4], "device": "cpu", "num_cpus": 0.4}
    await cluster.deploy({**tiny_settings(tmp_path_factory), **mesh}, build="jaxserve.ray:build", num_replicas=1)
    body = {"prompt": [1, 2, 3], "temperature": 0, **SHORT}
    before = await http.post("/v1/completions", json=body)
    [follower] = cluster.processes("ray::_Follower")
    engines = cluster.processes("jaxserve.worker")
    assert len(engines) == 2
    next(one for one in engines if one.ppid() == follower.pid).kill()
    after = await http.post("/v1/completions", json=body)
    assert (before.status_code, after.status_code) == (200, 200)
    assert before.json()["choices"] == after.json()["choices"]
    assert before.headers["x-replica-id"] != after.headers["x-replica-id"]
    await until(lambda: len(cluster.processes("jaxserve.worker")) == 2)
    assert not {one.pid for one in engines} & {one.pid for one in cluster.processes("jaxserve.worker")}


async def test_nothing_is_left(cluster: RayCluster) -> None:
    assert cluster.processes("ray::ServeReplica")
    cluster.call("shutdown")
    for named in ("ray::ServeReplica", "ray::_Follower", "fake_device", "jaxserve.worker", "jaxserve.text"):
        assert cluster.processes(named) == []
    cluster.call("end")
