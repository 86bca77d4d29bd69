"""Responses that are kept: continued, read, listed, referred to, deleted; and the bounds of what is kept."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from jaxserve.server.response_store import ResponseStore, StoredItem
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.openai.test_tools import writes
from tests.server.responses_api.ask import PATH, ask, prompt_of


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def own_id(name: str) -> str:
    """Return an id as the server makes them."""
    return f"msg_{name.encode().hex():0>32}"


def put(store: ResponseStore, name: str, previous: str | None = None, size: int = 10) -> None:
    """Put a response with two items of a size."""
    before = store.get(previous) if previous else None
    continued = None if before is None else (str(previous), [*before.input, *before.output])
    items = [StoredItem(own_id(f"{name}-{part}"), b"x" * size) for part in ("in", "out")]
    store.put(name, b"b" * size, continued=continued, input=items[:1], output=items[1:])


def names(items: list[StoredItem]) -> list[str]:
    return [bytes.fromhex(item.id.removeprefix("msg_")).lstrip(b"\0").decode() for item in items]


def test_a_response_has_the_items_of_all_turns():
    store = ResponseStore(9, 10**6, 60)
    put(store, "a")
    put(store, "b", "a")
    put(store, "c", "b")
    put(store, "d", "b")
    found = store.get("d")
    assert found is not None
    assert names(found.input) == ["a-in", "a-out", "b-in", "b-out", "d-in"]
    assert names(found.output) == ["d-out"]


def test_a_response_needs_no_other_to_stay():
    store = ResponseStore(9, 10**6, 60)
    put(store, "a")
    put(store, "b", "a")
    assert store.delete("a")
    assert not store.delete("a")
    assert store.get("a") is None
    found = store.get("b")
    assert found is not None
    assert names(found.input) == ["a-in", "a-out", "b-in"]
    assert store.item(own_id("a-out")) == b"x" * 10
    assert store.delete("b")
    assert (len(store), store.num_bytes, store.item(own_id("a-out"))) == (0, 0, None)


def test_what_was_not_used_for_longest_goes_first():
    store = ResponseStore(2, 10**6, 60)
    put(store, "a")
    put(store, "b")
    assert store.get("a") is not None
    put(store, "c")
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]
    assert store.num_evicted == 1


def test_bounds_of_size_and_age():
    clock = Clock()
    store = ResponseStore(99, 4000, 60, clock)
    put(store, "a", size=100)
    put(store, "b", size=100)  # 1974 bytes each, with ids and what they take besides
    put(store, "c", size=100)
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    put(store, "d", size=3000)
    put(store, "e", "c", size=600)  # with the turn before it, it is too large
    assert [store.get(name) is not None for name in "bcde"] == [True, True, False, False]
    clock.now = 59
    assert store.get("b") is not None
    assert store.item(own_id("c-in")) is not None
    clock.now = 118
    assert store.get("b") is not None
    clock.now = 120
    store.expire()
    assert [store.item(own_id(f"{name}-in")) is not None for name in "bc"] == [True, False]
    clock.now = 181
    store.expire()
    assert (len(store), store.num_bytes, store._items) == (0, 0, {})


def test_an_item_is_that_of_the_first_response_that_had_it():
    store = ResponseStore(99, 10**6, 60)
    put(store, "a")
    other = StoredItem(own_id("a-out"), b"forged")
    store.put("b", b"", continued=None, input=[other, StoredItem("mine", b"x")], output=[])
    assert store.item(other.id) == b"x" * 10
    assert store.item("mine") is None  # another client may have chosen it, too
    store.delete("b")
    assert store.item(other.id) == b"x" * 10
    put(store, "c", "a")
    store.delete("a")
    assert store.item(other.id) == b"x" * 10


def test_what_is_counted_is_what_is_kept():
    rng = random.Random(5)
    clock = Clock()
    store = ResponseStore(12, 12_000, 50, clock)
    known: list[str] = []
    for step in range(3000):
        clock.now += rng.random()
        if rng.random() < 0.6:
            previous = rng.choice(known) if known and rng.random() < 0.7 else None
            name = rng.choice(known) if known and rng.random() < 0.1 else f"r{step}"  # an id that was there before
            put(store, name, previous if previous and store.get(previous) else None, rng.randrange(60))
            known = [*known[-20:], name]
        elif known:
            (store.delete if rng.random() < 0.3 else store.get)(rng.choice(known))
        turns = {}
        for entry in store._entries.values():
            turn = entry.turn
            while turn is not None:
                turns[id(turn)] = turn
                turn = turn.before
        bodies = sum(entry.size for entry in store._entries.values())
        assert store.num_bytes == bodies + sum(turn.size for turn in turns.values()) <= 12_000
        assert len(store) <= 12
        assert set(store._items) == {item.id for turn in turns.values() for item in turn.items}


async def get(server: ServerUnderTest, path: str, status: int = 200) -> dict[str, Any]:
    answer = await server.http.get(f"{PATH}/{path}")
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_conversation_by_ids():
    async with over_asgi(engine=writes("Hi.")) as server:
        first = await ask(server, input="one", instructions="Be.")
        second = await ask(server, input="two", previous_response_id=first["id"])
        assert prompt_of(server) == "user\none\nassistant\nHi.\nuser\ntwo\nassistant\n"
        assert second["previous_response_id"] == first["id"]
        await ask(server, input="three", previous_response_id=second["id"])
        assert prompt_of(server) == "user\none\nassistant\nHi.\nuser\ntwo\nassistant\nHi.\nuser\nthree\nassistant\n"
        other = await ask(server, input="other", previous_response_id=first["id"])
        assert prompt_of(server) == "user\none\nassistant\nHi.\nuser\nother\nassistant\n"
        assert await get(server, other["id"]) == other
        assert await get(server, first["id"]) == first


async def test_clients_that_choose_one_id_twice():
    async with over_asgi(engine=writes("Hi.")) as server:
        server.engine.hold()
        headers = {"x-request-id": "mine"}
        open_ones = [
            asyncio.create_task(server.http.post(PATH, json={"input": text}, headers=headers)) for text in ("a", "b")
        ]
        await server.engine.wait_for(lambda: server.engine.num_running == 2)
        assert (await get(server, "resp_mine"))["status"] == "in_progress"
        server.engine.release()
        assert {(await task).status_code for task in open_ones} == {200}
        assert (await get(server, "resp_mine"))["status"] == "completed"
        await server.http.delete(f"{PATH}/resp_mine")
        assert (len(server.state.responses), server.state.responses.num_bytes) == (0, 0)


async def test_a_conversation_goes_on_without_new_input():
    async with over_asgi(engine=writes("Hi.")) as server:
        first = await ask(server, input="one")
        await ask(server, input=[], previous_response_id=first["id"])
        assert prompt_of(server) == "user\none\nassistant\nHi.\nassistant\n"


async def test_items_that_are_sent_twice_have_ids_of_their_own():
    async with over_asgi(engine=writes("Hi.")) as server:
        first = await ask(server, input="one")
        [answer] = first["output"]
        twice = [{"role": "user", "content": "x", "id": "mine"}] * 2
        second = await ask(server, input=[answer, *twice], previous_response_id=first["id"])
        listed = (await get(server, f"{second['id']}/input_items"))["data"]
        assert len(listed) == len({item["id"] for item in listed}) == 5


async def test_a_response_that_is_still_written():
    async with over_asgi(engine=writes("Hi.")) as server:
        server.engine.hold()
        task = asyncio.create_task(server.http.post(PATH, json={"input": "a"}, headers={"x-request-id": "mine"}))
        await server.engine.wait_for(lambda: server.engine.num_running == 1)
        error = await ask(server, 400, previous_response_id="resp_mine")
        assert "still being written" in error["message"]
        assert (await server.http.delete(f"{PATH}/resp_mine")).status_code == 400
        server.engine.release()
        assert (await task).status_code == 200


@pytest.mark.parametrize("name", ["a/b", "x" * 256, "é"])
async def test_ids_of_requests_that_can_be_no_part_of_a_path(name: str):
    async with over_asgi(engine=writes("Hi.")) as server:
        answer = await server.http.post(PATH, json={"input": "a"}, headers={"x-request-id": name.encode()})
        response = answer.json()
        assert await get(server, response["id"]) == response
        await ask(server, previous_response_id=response["id"])


async def test_a_response_as_deep_as_a_body_may_be():
    deep = "[" * 1400 + "]" * 1400
    body = '{"input": "a", "stream": true, "metadata": ' + deep + ', "user": ' + deep + "}"
    async with over_asgi(engine=writes("Hi.")) as server:
        answer = await server.http.post(PATH, content=body)
        assert "event: response.completed" in answer.text
        assert len(server.state.responses) == 1


async def test_nothing_is_kept_that_is_not_to_be_stored():
    async with over_asgi(engine=writes("Hi.")) as server:
        response = await ask(server, store=False)
        assert response["store"] is False
        await get(server, response["id"], 404)
        error = await ask(server, 404, previous_response_id=response["id"])
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
        assert "--max-stored-responses" in error["message"]
        assert len(server.state.responses) == 0


async def test_a_server_that_keeps_nothing():
    async with over_asgi(engine=writes("Hi."), max_stored_responses=0) as server:
        response = await ask(server)
        assert response["store"] is False
        await ask(server, 404, previous_response_id=response["id"])


async def test_references_to_items():
    async with over_asgi(engine=writes("Hi.")) as server:
        first = await ask(server, input=[{"role": "user", "content": "one"}])
        [message] = first["output"]
        [question] = (await get(server, f"{first['id']}/input_items"))["data"]
        references = [{"type": "item_reference", "id": question["id"]}, {"id": message["id"]}]
        second = await ask(server, input=[*references, {"role": "user", "content": "two"}])
        assert prompt_of(server) == "user\none\nassistant\nHi.\nuser\ntwo\nassistant\n"
        await server.http.delete(f"{PATH}/{first['id']}")
        listed = await get(server, f"{second['id']}/input_items?order=asc")
        assert [item["id"] for item in listed["data"]][:2] == [question["id"], message["id"]]


async def test_pages_of_input_items():
    async with over_asgi(engine=writes("Hi.")) as server:
        first = await ask(server, input=[{"role": "user", "content": str(number)} for number in range(5)])
        second = await ask(server, input="more", previous_response_id=first["id"])
        everything = await get(server, f"{second['id']}/input_items?order=asc&limit=100")
        assert len(everything["data"]) == 7
        assert everything["data"][5]["role"] == "assistant"
        assert everything["data"][6]["content"] == [{"type": "input_text", "text": "more"}]
        assert {item["type"] for item in everything["data"]} == {"message"}
        found, after = [], ""
        while True:
            page = await get(server, f"{second['id']}/input_items?limit=3{after}")
            found += page["data"]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert found == everything["data"][::-1]
        for query in ("limit=0", "limit=101", "limit=x", f"limit={'9' * 5000}", "order=up", "after=nobody"):
            error = await get(server, f"{second['id']}/input_items?{query}", 400)
            assert error["error"]["param"] == query.partition("=")[0]


async def test_deleting_and_reading():
    async with over_asgi(engine=writes("Hi.")) as server:
        response = await ask(server)
        await get(server, f"{response['id']}?stream=true", 400)
        deleted = (await server.http.delete(f"{PATH}/{response['id']}")).json()
        assert deleted == {"id": response["id"], "object": "response", "deleted": True}
        for path in (response["id"], f"{response['id']}/input_items"):
            assert "not found" in (await get(server, path, 404))["error"]["message"]
        assert (await server.http.delete(f"{PATH}/{response['id']}")).status_code == 404
        assert (await server.http.post(f"{PATH}/{response['id']}/cancel")).status_code == 404


@pytest.mark.parametrize("key", ["", "secret"])
async def test_routes_of_the_store_need_the_key(key: str):
    async with over_asgi(api_key="secret") as server:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        for method, path in (("GET", "x"), ("DELETE", "x"), ("POST", "x/cancel"), ("GET", "x/input_items")):
            answer = await server.http.request(method, f"{PATH}/{path}", headers=headers)
            assert answer.status_code == (404 if key else 401)


async def test_many_clients_fill_the_store_past_its_bounds():
    rng = random.Random(3)
    async with over_asgi(
        engine=writes("Hello, you.") | {"max_model_len": 10**6},
        max_stored_responses=40,
        max_stored_response_bytes=60_000,
    ) as server:
        lost = 0

        async def client(number: int) -> None:
            nonlocal lost
            previous, known = None, [f"client {number}"]
            for turn in range(8):
                known.append(f"turn {turn} " + "x" * rng.randrange(200))
                body = {"input": known[-1], "previous_response_id": previous, "stream": rng.random() < 0.5}
                answer = await server.http.post(PATH, json=body)
                if answer.status_code == 404:
                    assert answer.json()["error"]["code"] == "previous_response_not_found"
                    previous, lost = None, lost + 1
                    continue
                last = json.loads(answer.text.rstrip().rpartition("data: ")[2]) if body["stream"] else answer.json()
                previous = last["response"]["id"] if body["stream"] else last["id"]
                assert len(server.state.responses) <= 40
                assert server.state.responses.num_bytes <= 100_000

        await asyncio.gather(*map(client, range(64)))
        assert lost > 0
        assert server.state.responses.num_evicted > 100
