from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.pooling.tasks import EMBED, both
from tests.server.tiny import BOS_ID, END_ID

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SHOUTING = (
    "{% for m in messages %}{{ m.role | upper }}:{{ m.content }}<s>{% endfor %}"
    "{% if enable_thinking is false %}!{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
SHOUTED = [*b"USER:hi", BOS_ID]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/chat/completions/render": {"max_tokens": 1},
    "/tokenize": {},
    "/v1/embeddings": {},
    "/pooling": {},
}


async def prompt_of(server: ServerUnderTest, path: str, **body: Any) -> list[int]:
    response = await server.http.post(path, json=CHAT | ROUTES[path] | body)
    assert response.status_code == 200, response.text
    answer = response.json()
    found: list[int] = answer.get("tokens") or answer.get("token_ids") or server.engine.submitted[-1].prompt_ids
    return found


@pytest.mark.parametrize("path", ROUTES)
async def test_a_template_of_a_request_is_used_for_it_alone(path: str):
    async with over_asgi(task=both(EMBED), trust_request_chat_template=True) as server:
        own = await prompt_of(server, path)
        shouted = await prompt_of(server, path, chat_template=SHOUTING, add_generation_prompt=True)
        assert shouted == [*SHOUTED, ord(">")]
        assert await prompt_of(server, path) == own


@pytest.mark.parametrize("path", ROUTES)
async def test_without_the_flag_it_is_refused(path: str):
    async with over_asgi(task=both(EMBED)) as server:
        response = await server.http.post(path, json=CHAT | {"chat_template": SHOUTING})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "prompt"), ("/v1/embeddings", "input")])
async def test_it_needs_messages(path: str, field: str):
    async with over_asgi(task=both(EMBED), trust_request_chat_template=True) as server:
        response = await server.http.post(path, json={field: "a", "chat_template": SHOUTING})
        assert (response.status_code, response.json()["error"]["message"]) == (400, "chat_template needs messages")


async def test_what_is_known_of_a_template_is_its_own():
    thinks = {"chat_template_kwargs": {"enable_thinking": False}}
    async with over_asgi(trust_request_chat_template=True) as server:
        assert await prompt_of(server, "/tokenize", chat_template=SHOUTING, **thinks) == [*SHOUTED, *b"!>"]
        thinks = {"chat_template_kwargs": {"enable_thinking": True}}
        response = await server.http.post("/tokenize", json=CHAT | thinks | {"chat_template": "{{ messages }}"})
        assert response.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"
        await prompt_of(server, "/v1/chat/completions")
        await prompt_of(server, "/v1/chat/completions", chat_template=SHOUTING)
        assert [request.stop_ids for request in server.engine.submitted] == [(END_ID,), (END_ID, BOS_ID)]


async def test_the_last_few_templates_are_kept():
    async with over_asgi(trust_request_chat_template=True) as server:
        assert server.state.loaded is not None
        kept = server.state.loaded.by_template
        await prompt_of(server, "/tokenize", chat_template=SHOUTING)
        first = kept[SHOUTING]
        for number in range(7):
            await prompt_of(server, "/tokenize", chat_template=str(number))
        await prompt_of(server, "/tokenize", chat_template=SHOUTING)
        await prompt_of(server, "/tokenize", chat_template="one more")
        assert kept[SHOUTING] is first
        assert list(kept) == [*"123456", SHOUTING, "one more"]
