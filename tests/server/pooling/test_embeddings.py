from __future__ import annotations

import base64
import dataclasses
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jaxserve.text.tokenizers.tokenizer import Tokenizer
from jaxserve.text.tokenizers.tokenizer_parts import TokenizerParts
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.fake_engine import vector_of
from tests.server.pooling.tasks import EMBED, LABELS, both, only
from tests.server.tiny import BOS_ID, END_ID, SPECIAL, TEMPLATE
from tests.tiny_model import byte_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
PROMPTS = {"prompts": (("query", "Q: "), ("document", "")), "default_prompt": "query"}


def with_end() -> Tokenizer:
    """Return a tokenizer that ends texts with a special token, as that of Qwen3-Embedding does."""
    backend = byte_tokenizer(*SPECIAL)
    backend.post_processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", END_ID)])
    return Tokenizer(TokenizerParts(backend, (END_ID,), BOS_ID, {}, {"default": TEMPLATE}))


def normalized(ids: list[int], dimensions: int | None = None) -> Any:
    vector = vector_of(ids)[:dimensions].astype(np.float64)
    return pytest.approx((vector / np.linalg.norm(vector)).tolist(), rel=1e-6)


async def embed(server: ServerUnderTest, **body: Any) -> list[Any]:
    response = await server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


async def refusal(server: ServerUnderTest, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    response = await server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert not server.engine.submitted
    return response.json()["error"]


async def test_openais_shape():
    async with over_asgi(task=only(EMBED)) as server:
        body = {"model": "tiny", "input": ["hello", "b"], "user": "u"}
        response = await server.http.post("/v1/embeddings", json=body, headers={"x-request-id": "mine"})
        answer = response.json()
        assert answer.pop("created") > 0
        assert answer == {
            "id": "embd-mine",
            "object": "list",
            "model": "tiny",
            "data": [
                {"object": "embedding", "index": 0, "embedding": normalized([*b"hello"])},
                {"object": "embedding", "index": 1, "embedding": normalized([*b"b"])},
            ],
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        }
        assert all(request.pooled and request.sampling.max_tokens == 0 for request in server.engine.submitted)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        ("<s>a", [[BOS_ID, 97]]),
    ],
)
async def test_texts_and_ids(given: Any, ids: list[list[int]]):
    async with over_asgi(task=both(EMBED)) as server:
        assert await embed(server, input=given) == [normalized(each) for each in ids]


async def test_a_conversation_is_one_text():
    async with over_asgi(task=both(EMBED)) as server:
        for more, end in (({}, ""), ({"add_generation_prompt": True}, "<|im_start|>assistant\n")):
            await embed(server, messages=HELLO, **more)
            text = f"<|im_start|>user\nhello<|im_end|>\n{end}"
            assert server.engine.submitted[-1].prompt_ids == server.state.require_loaded().tokenizer.encode(text)
        await embed(server, messages=HELLO, truncate_prompt_tokens=3)
        assert len(server.engine.submitted[-1].prompt_ids) == 3


async def test_special_tokens_stay_when_texts_are_truncated():
    async with over_asgi(task=only(EMBED), tokenizer=with_end()) as server:
        for more, ids in (
            ({}, [*b"abcdef", END_ID]),
            ({"truncate_prompt_tokens": 4}, [*b"abc", END_ID]),
            ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, [*b"def", END_ID]),
            ({"add_special_tokens": False}, [*b"abcdef"]),
        ):
            assert await embed(server, input="abcdef", **more) == [normalized(ids)]
        assert await embed(server, input=[*b"abcdef"], truncate_prompt_tokens=4) == [normalized([*b"abcd"])]
        assert await embed(server, input="a" * 600, truncate_prompt_tokens=-1) == [normalized([97] * 511 + [END_ID])]
        await embed(server, input="a" * 511)


async def test_prompts_of_the_model():
    async with over_asgi(task=only(EMBED, **PROMPTS)) as server:
        for more, text in (({}, "Q: a"), ({"prompt_name": "document"}, "a"), ({"prompt_name": ""}, "a")):
            assert await embed(server, input=["a"], **more) == [normalized([*text.encode()])]
        assert await embed(server, input=[97]) == [normalized([97])], "ids stay as they are"
        assert await embed(server, messages=HELLO) != await embed(server, input="Q: hello")


async def test_formats_dimensions_and_normalization():
    async with over_asgi(task=only(EMBED)) as server:
        [written] = await embed(server, input="ab", encoding_format="base64", dimensions=3)
        assert np.frombuffer(base64.b64decode(written), "<f4").tolist() == normalized([*b"ab"], 3)
        for name in ("normalize", "use_activation"):
            assert await embed(server, input="ab", **{name: False}) == [vector_of([*b"ab"]).tolist()]
            assert await embed(server, input="ab", **{name: True}) == [normalized([*b"ab"])]


async def test_fields_reach_the_engine():
    async with over_asgi(task=only(EMBED), engine={"schedule_policy": "priority"}) as server:
        await embed(server, input=["a", "b"], priority=3, cache_salt="tenant", request_id="mine")
        found = [(one.priority, one.namespace, one.request_id[:9]) for one in server.engine.submitted]
        assert found == [(3, "tenant", "embd-mine")] * 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "one of input and messages"),
        ({"input": "a", "messages": HELLO}, "input", "one of input and messages"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", ""]}, "input[1]", "is empty"),
        ({"input": [[1], []]}, "input[1]", "is empty"),
        ({"input": ["a", 1]}, "input", "mixes"),
        ({"input": ["a", [1]]}, "input", "mixes"),
        ({"input": [259]}, "input", "token id 259"),
        ({"input": [[1], [-1]]}, "input[1]", "token id -1"),
        ({"input": ["a"] * 2049}, "input", "input has 2049 entries; a request may have at most 2048"),
        ({"input": "a" * 513}, "input", "resulted in 513 tokens"),
        ({"input": ["a", "b" * 9000]}, "input[1]", "resulted in at least"),
        ({"input": [1] * 513}, "input", "resulted in 513 tokens"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "[1, 512]"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "[1, 512]"),
        ({"input": "a", "dimensions": 5}, "dimensions", "[1, 4]"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "it has none"),
        ({"input": [1], "prompt_name": ""}, "prompt_name", "needs texts"),
        ({"messages": HELLO, "prompt_name": ""}, "prompt_name", "needs texts"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "it can be base64, float"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "float32"),
        ({"input": "a", "endianness": "big"}, "endianness", "little-endian"),
        ({"input": "a", "padding": "max_length"}, "padding", "no padding"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "different things"),
        ({"input": "a", "priority": 1}, "priority", "--schedule-policy"),
        ({"input": "a", "dimension": 2}, "dimension", "did you mean 'dimensions'"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str, words: str):
    async with over_asgi(task=both(EMBED)) as server:
        error = await refusal(server, **body)
        assert (error["param"], words in error["message"]) == (param, True), error


async def test_the_limits_of_the_model_count():
    short = dataclasses.replace(EMBED, max_tokens=8, dimensions=(2,))
    async with over_asgi(task=only(short)) as server:
        assert "maximum context length is 8" in (await refusal(server, input=[97] * 9))["message"]
        assert "one of 2, 4" in (await refusal(server, input="a", dimensions=3))["message"]
        await embed(server, input="a" * 8)


async def test_vllms_pooling():
    async with over_asgi(task=only(EMBED)) as server:
        response = await server.http.post("/pooling", json={"input": "ab", "task": "embed", "rid": "r"})
        answer = response.json()
        assert (answer["id"], answer["object"], answer["usage"]["total_tokens"]) == ("r", "list", 2)
        assert answer["data"] == [{"object": "pooling", "index": 0, "data": normalized([*b"ab"])}]
    async with over_asgi(task=only(LABELS)) as server:
        response = await server.http.post("/pooling", json={"input": "ab", "use_activation": False})
        assert response.json()["data"][0]["data"] == vector_of([*b"ab"]).tolist()
        response = await server.http.post("/pooling", json={"input": "ab"})
        assert sum(response.json()["data"][0]["data"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"task": "token_classify"}, "task", "it can be classify, embed, token_embed"),
        ({"task": "token_embed"}, "task", "does classify"),
        ({"task": "embed"}, "task", "does classify"),
        ({"dimensions": 2}, "dimensions", "labels texts"),
        ({"prompt_name": ""}, "prompt_name", "labels texts"),
        ({"normalize": True}, "normalize", "labels texts"),
    ],
)
async def test_refusals_of_pooling(body: dict[str, Any], param: str, words: str):
    async with over_asgi(task=only(LABELS)) as server:
        error = await refusal(server, "/pooling", input="a", **body)
        assert (error["param"], words in error["message"]) == (param, True), error
