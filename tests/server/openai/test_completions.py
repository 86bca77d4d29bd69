from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.fake_engine import logprobs_of
from tests.server.tiny import END_ID


async def complete(server: ServerUnderTest, **body: object) -> dict:
    response = await server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(server: ServerUnderTest, **body: object) -> list[dict]:
    response = await server.http.post("/v1/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return events(response)


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def letters(last: str, count: int, sample: int = 0) -> str:
    return "".join(chr(ord("a") + (ord(last) + sample + step) % 26) for step in range(count))


async def test_the_openai_shape(server: ServerUnderTest):
    answer = await complete(server, prompt="hello", max_tokens=5)
    choice = {
        "index": 0,
        "text": letters("o", 5),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "matched_stop": None,
    }
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": None,
        "choices": [choice],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "lasts"),
    [("abc", "c"), (["abc", "de"], "ce"), ([97, 98], "b"), ([[97], [98, 99]], "ac"), (["x"], "x")],
)
async def test_every_form_of_prompt(server: ServerUnderTest, prompt: object, lasts: str):
    answer = await complete(server, prompt=prompt, max_tokens=4)
    assert [choice["text"] for choice in answer["choices"]] == [letters(last, 4) for last in lasts]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(lasts)))


async def test_choices_are_prompt_times_n_plus_sample(server: ServerUnderTest):
    answer = await complete(server, prompt=["a", "k"], n=3, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == [
        letters(last, 2, sample) for last in "ak" for sample in range(3)
    ]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12
    groups = [(request.group_id, request.sample) for request in server.engine.submitted]
    assert len({group for group, _ in groups}) == 2
    assert [sample for _, sample in groups] == [0, 1, 2, 0, 1, 2]


async def test_defaults(server: ServerUnderTest):
    answer = await complete(server, prompt="a")
    assert len(answer["choices"][0]["text"]) == 16
    nulls = await complete(
        server, prompt="a", max_tokens=None, n=None, stop=None, logprobs=None, temperature=None, suffix=None, seed=None
    )
    assert nulls["choices"] == answer["choices"]


async def test_the_default_limit_fits_the_context(server: ServerUnderTest):
    answer = await complete(server, prompt="a" * 510)
    assert answer["usage"]["completion_tokens"] == 2


async def test_sampling_fields_reach_the_engine(server: ServerUnderTest):
    await complete(
        server,
        prompt="a",
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias={"5": 1.5, "6": -100},
        min_tokens=2,
        seed=42,
        stop=["x1", "y1"],
        stop_token_ids=[9, 10],
        logprobs=3,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    (request,) = server.engine.submitted
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (3, 0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, 0.3)
    assert sampling.logit_bias == {5: 1.5, 6: -100.0}
    assert (sampling.min_tokens, sampling.seed, sampling.stop) == (2, 42, ("x1", "y1"))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, None)
    assert not sampling.skip_special_tokens
    assert sampling.include_stop_str_in_output
    assert request.stop_ids == (END_ID, 9, 10)


async def test_ignore_eos_keeps_the_requests_stop_ids(server: ServerUnderTest):
    await complete(server, prompt="a", max_tokens=1, ignore_eos=True, stop_token_ids=[9])
    assert server.engine.submitted[0].stop_ids == (9,)


async def test_a_stop_string_ends_the_output_and_aborts_in_the_engine(server: ServerUnderTest):
    whole = letters("a", 30)
    answer = await complete(server, prompt="a", max_tokens=30, stop=[whole[5:8], "never"])
    choice = answer["choices"][0]
    assert choice["text"] == whole[:5]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[5:8])
    assert answer["usage"]["completion_tokens"] == 8
    assert server.engine.aborted == [server.engine.submitted[0].request_id]
    assert server.engine.num_running == 0


async def test_a_stop_token(server: ServerUnderTest):
    whole = letters("a", 30)
    answer = await complete(server, prompt="a", stop_token_ids=[ord(whole[4])])
    assert answer["choices"][0]["text"] == whole[:4]
    assert answer["choices"][0]["stop_reason"] == ord(whole[4])
    assert answer["usage"]["completion_tokens"] == 5


async def test_cached_tokens_are_reported():
    async with over_asgi(engine={"cached_tokens": 3}) as server:
        answer = await complete(server, prompt=["abcde", "fghij"], n=2, max_tokens=1)
        streamed = await stream(server, prompt="abcde", n=2, max_tokens=1, stream_options={"include_usage": True})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert streamed[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("streamed", [False, True])
async def test_cached_tokens_of_an_output_ended_by_a_stop_string(streamed: bool):
    async with over_asgi(engine={"cached_tokens": 3}) as server:
        stop = letters("e", 5)[-1]
        if streamed:
            body = {"prompt": "abcde", "max_tokens": 20, "stop": stop, "stream_options": {"include_usage": True}}
            usage = (await stream(server, **body))[-1]["usage"]
        else:
            usage = (await complete(server, prompt="abcde", max_tokens=20, stop=stop))["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": ["abc", "de"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_priority_and_cache_salt_reach_the_engine(path: str, prompt: dict[str, Any]):
    async with over_asgi(engine={"schedule_policy": "priority"}) as server:
        fields = {"n": 2, "max_tokens": 1, "priority": -7, "cache_salt": "tenant"}
        response = await server.http.post(f"/v1/{path}", json=prompt | fields)
        assert response.status_code == 200, response.text
        submitted = server.engine.submitted
        assert {(request.priority, request.namespace) for request in submitted} == {(-7, "tenant")}
        count = len(submitted)
        await server.http.post(f"/v1/{path}", json=prompt | {"max_tokens": 1})
        assert {(request.priority, request.namespace) for request in submitted[count:]} == {(None, "")}


async def test_logprobs_in_the_legacy_shape(server: ServerUnderTest):
    answer = await complete(server, prompt="abc", max_tokens=3, logprobs=2)
    text = letters("c", 3)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(text)
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == pytest.approx([-ord(char) / 100 for char in text])
    # JSON has no infinity; OpenAI writes -9999 for probability 0.
    assert logprobs["top_logprobs"][0] == {text[0]: pytest.approx(-ord(text[0]) / 100), chr(ord(text[0]) + 1): -9999.0}


async def test_logprobs_zero_has_only_the_sampled_token(server: ServerUnderTest):
    answer = await complete(server, prompt="abc", max_tokens=2, logprobs=0)
    assert [list(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"]] == [[c] for c in letters("c", 2)]


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_echo(server: ServerUnderTest, prompt: object):
    answer = await complete(server, prompt=prompt, max_tokens=2, echo=True)
    assert answer["choices"][0]["text"] == "abc" + letters("c", 2)


async def test_echo_with_logprobs_covers_the_prompt(server: ServerUnderTest):
    answer = await complete(server, prompt="abc", max_tokens=2, echo=True, logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("abc" + letters("c", 2))
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == pytest.approx(logprobs_of(ord("b"), 1).logprob)


async def test_tokens_of_log_probabilities_may_be_written_as_ids():
    """As vLLM's; a comparison of servers asks for it, since several tokens may have one text."""
    body = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 2}
    async with over_asgi(return_tokens_as_token_ids=True) as server:
        by_id = await complete(server, **body)
        [*_, last] = await stream(server, **body)
        by_text = await complete(server, **body, return_tokens_as_token_ids=False)
    names, texts = (answer["choices"][0]["logprobs"] for answer in (by_id, by_text))
    assert names["tokens"] == [f"token_id:{ord(text)}" for text in texts["tokens"]]
    assert names["tokens"][:3] == ["token_id:97", "token_id:98", "token_id:99"]
    tops = [{f"token_id:{ord(text)}": value for text, value in (top or {}).items()} for top in texts["top_logprobs"]]
    assert [top or {} for top in names["top_logprobs"]] == tops
    assert names["text_offset"] == texts["text_offset"]
    assert last["choices"][0]["logprobs"] == names


async def test_echo_without_output_scores_the_prompt(server: ServerUnderTest):
    answer = await complete(server, prompt=["abc", "de"], max_tokens=0, echo=True, logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "de"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 2]
    assert answer["usage"]["completion_tokens"] == 0


async def test_return_token_ids(server: ServerUnderTest):
    answer = await complete(server, prompt="ab", max_tokens=3, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == list(letters("b", 3).encode())
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]


async def test_a_stream_has_one_finish_reason_per_choice_and_ends_with_done(server: ServerUnderTest):
    chunks = await stream(server, prompt=["a", "b"], n=2, max_tokens=5)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" and len(chunk["choices"]) == 1 for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    ends = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2, 3]
    # All sequences advance together: each begins before any ends.
    begun = {choice["index"] for choice in choices[:4]}
    assert begun == {0, 1, 2, 3}


async def test_continuous_usage_stats(server: ServerUnderTest):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, end = await stream(server, prompt=["hello", "a"], max_tokens=8, echo=True, stream_options=options)
    for index, prompt in enumerate((5, 1)):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 8
        assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {prompt}
    assert end["usage"]["total_tokens"] == 6 + 16


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"stop": ["zzz", letters("y", 9)[6:9]]},
        {"logprobs": 2},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"return_token_ids": True},
        {"max_tokens": 0},
    ],
)
async def test_streamed_equals_unstreamed(body: dict, tokens_per_step: int):
    body = {"prompt": ["hello", "day"], "max_tokens": 20} | body
    async with over_asgi(engine={"tokens_per_step": tokens_per_step}) as server:
        whole = await complete(server, **body)
        chunks = await stream(server, **body, stream_options={"include_usage": True})
    *pieces, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in pieces)
    for choice in whole["choices"]:
        mine = [c for chunk in pieces for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                assert [v for c in mine if c["logprobs"] for v in c["logprobs"][key]] == values
        if "token_ids" in choice:
            assert [t for c in mine for t in c.get("token_ids", ())] == choice["token_ids"]
            assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]


async def test_no_half_characters_in_a_stream():
    text = "日本語 ☃ 𝄞 עברית हिन्दी"
    async with over_asgi(engine={"rule": lambda _: iter(text.encode() + bytes(4))}) as server:
        length = len(text.encode())
        whole = await complete(server, prompt="a", max_tokens=length)
        chunks = await stream(server, prompt="a", max_tokens=length)
    parts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert whole["choices"][0]["text"] == "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)
