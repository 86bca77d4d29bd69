"""The default model served by a real process, tried with the `openai` client."""

from __future__ import annotations

import asyncio
import json
import random
import re
import string
from typing import Any, Literal

import httpx
import openai
import psutil
import pydantic
import pytest

from tests.e2e.server_process import ServerProcess, has_jax
from tests.selection import examples, grid

pytestmark = pytest.mark.process

MODEL = "smollm2-135m-instruct"
SCRIPTS = {
    "latin": "Das Wetter in Köln ist heute schön, und",
    "cyrillic": "Жили-были старик со старухой у самого",
    "greek": "Η θάλασσα το καλοκαίρι είναι πολύ",
    "arabic": "كان يا ما كان في قديم الزمان",
    "hebrew": "בראשית ברא אלהים את השמים",
    "devanagari": "एक समय की बात है, एक छोटे से गाँव में",
    "chinese": "从前有一座山,山里有一座庙,",
    "japanese": "むかしむかし、あるところに",
    "korean": "옛날 옛적에 한 나무꾼이",
    "thai": "กาลครั้งหนึ่งนานมาแล้ว 🙂👩‍👩‍👧",
}


def test_it_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("script", grid(SCRIPTS, lambda script: script in ("latin", "devanagari", "thai")))
def test_streamed_equals_unstreamed(client: openai.OpenAI, script: str) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": SCRIPTS[script], "max_tokens": 40, "temperature": 1, "seed": 7}
    # Each finds nothing in the prefix cache: in bfloat16 a prompt in other pieces may give other tokens.
    whole = client.completions.create(**request, extra_body={"cache_salt": "whole"})
    options: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"cache_salt": "streamed"}}
    with client.completions.create(**request, stream=True, **options) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].usage == whole.usage


def test_only_the_engine_has_jax(server: ServerProcess) -> None:
    pids = server.family()
    assert [has_jax(pid) for pid in pids].count(True) == 1, pids
    assert not has_jax(server.process.pid)
    assert [has_jax(child.pid) for child in psutil.Process(server.process.pid).children()].count(True) == 1


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    likes: Literal["tea", "coffee"]


PERSON: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Make up a person."}],
    "response_format": Person,
    "max_tokens": 200,
    "temperature": 2,
}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_in_the_form_of_a_class_streamed_or_not(client: openai.OpenAI, seed: int) -> None:
    whole = client.chat.completions.parse(**PERSON, seed=seed)
    assert whole.choices[0].finish_reason == "stop"
    assert isinstance(whole.choices[0].message.parsed, Person)
    with client.chat.completions.stream(**PERSON, seed=seed) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


def test_samples_in_a_form(server: ServerProcess) -> None:
    async def ask() -> openai.types.Completion:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as client:
            form = {"structured_outputs": {"regex": "(red|green) [0-9]{3}"}}
            return await client.completions.create(
                model=MODEL, prompt="A color:", n=8, temperature=1, max_tokens=20, logprobs=2, extra_body=form
            )

    answer = asyncio.run(ask())
    texts = [choice.text for choice in answer.choices]
    assert all(re.fullmatch("(red|green) [0-9]{3}", text) for text in texts), texts
    assert len(set(texts)) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text


def test_a_grammar_that_explodes_delays_nobody(server: ServerProcess) -> None:
    patterns = [{"pattern": f"[a-z]{{3}}{letter}[0-9]*"} for letter in string.ascii_lowercase]
    exploding = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "allOf": patterns}}}

    async def both() -> tuple[httpx.Response, int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            body = {"messages": [{"role": "user", "content": "x"}], "response_format": exploding}
            slow = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            answered = 0
            while not slow.done():
                for form in ({}, {"guided_regex": "[a-z]{5}"}):
                    body = {"prompt": "a", "max_tokens": 4, **form}
                    (await client.post("/v1/completions", json=body)).raise_for_status()
                    answered += 1
            return await slow, answered

    refused, answered = asyncio.run(both())
    assert refused.status_code == 400
    assert "it takes more than 5 s to compile" in refused.json()["error"]["message"]
    assert answered > 4


def test_a_third_hangs_up_and_nothing_leaks(server: ServerProcess) -> None:
    rng = random.Random(0)
    form = {"json": {"type": "array", "items": {"enum": ["one", "two", 3]}, "minItems": 2}}

    async def message(http: httpx.AsyncClient, index: int) -> int:
        text = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 80)))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": rng.randrange(2, 60), "stream": True}
        if index % 4 == 1:
            body |= {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}
            body |= {"tool_choice": {"type": "any"}}
        events = 0
        async with http.stream("POST", "/v1/messages", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                events += line.startswith("data: ")
                if events and index % 3 == 0:
                    break
        return events

    async def conversation(http: httpx.AsyncClient, index: int) -> int:
        events, previous = 0, None
        for turn in range(3):
            body = {"input": f"{index} {turn}", "max_output_tokens": rng.randrange(2, 30), "stream": True}
            if index % 2:
                body |= {"tools": [{"type": "custom", "name": "f"}], "tool_choice": "required"}
            body["previous_response_id"] = previous if index % 2 == 0 else None
            async with http.stream("POST", "/v1/responses", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    events += line.startswith("data: ")
                    if line.startswith("data: "):
                        previous = json.loads(line[6:]).get("response", {}).get("id", previous)
                    if events and index % 3 == 0:
                        return events
        return events

    async def one(client: openai.AsyncOpenAI, index: int) -> int:
        prompt = [rng.randrange(100, 40000) for _ in range(rng.randrange(1, 300))]
        stream = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=rng.randrange(2, 60),
            stream=True,
            temperature=rng.choice([0, 1]),
            extra_body={"ignore_eos": True} | ({"structured_outputs": form} if index % 2 else {}),
        )
        events = 0
        async with stream:
            async for _ in stream:
                events += 1
                if index % 3 == 0:
                    break
        return events

    async def crowd() -> list[int]:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as client,
            httpx.AsyncClient(base_url=server.url, timeout=300) as http,
        ):
            indexes = range(examples(64, 16))
            asked = []
            for index in indexes:
                kind = index // 2 % 3
                asked.append(one(client, index) if not kind else (message, conversation)[kind - 1](http, index))
            return await asyncio.gather(*asked)

    assert all(asyncio.run(crowd()))
    # The last hang-ups are under way when the crowd has gone: ask until they have arrived.
    for _ in range(100):
        info = server.info()
        if not info["open_requests"] and not info["stats"]["num_running"]:
            break
    assert info["open_requests"] == 0
    assert info["stats"]["num_free_pages"] + info["stats"]["num_evictable_pages"] == info["stats"]["num_pages"]
    assert info["stats"]["integrity_errors"] == []


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "1000000"),
        ({"prompt": [-1]}, 400, "-1"),
        ({"prompt": [5] * 2000}, 400, "1024"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 2}, 400, "top_p"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"prompt": "a", "nonsense": 1}, 400, "nonsense"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
    ],
)
def test_bad_requests_are_named(server: ServerProcess, body: dict[str, Any], status: int, named: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b'{"prompt": NaN}', b"[]", b"\xfb\xfe"])
def test_broken_json_is_a_400(server: ServerProcess, content: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=content, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("counts", "lengths"),
    [
        pytest.param((1, 8), (1, 40, 250), id="some"),
        pytest.param((1, 2, 3, 5, 8), (1, 16, 60, 100, 250, 600), id="all", marks=pytest.mark.grid),
    ],
)
def test_no_compile_after_ready(server: ServerProcess, counts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Decode and mixed programs of all sizes run; nothing is compiled for them."""

    async def ask(count: int, length: int) -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            bodies = [
                {
                    "model": MODEL,
                    "prompt": [7 + i] * length,
                    "max_tokens": 4,
                    "temperature": i % 2,
                    "logprobs": 2 if i % 3 == 0 else None,
                    "echo": i == 1,
                }
                for i in range(count)
            ]
            answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))
            assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]

    for count in counts:
        for length in lengths:
            asyncio.run(ask(count, length))
    metrics = httpx.get(f"{server.url}/metrics").text
    [line] = [line for line in metrics.splitlines() if line.startswith("jaxserve:compiles_after_ready")]
    assert float(line.split()[-1]) == 0
    assert server.info()["stats"]["compiles_after_ready"] == 0
