"""Labels of texts, and SGLang's route for vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server.conftest import over_asgi
from tests.server.fake_engine import vector_of
from tests.server.pooling.tasks import EMBED, LABELS, REWARD, only
from tests.server.pooling.test_embeddings import normalized, refusal


def softmax(ids: list[int]) -> Any:
    values = np.exp(vector_of(ids).astype(np.float64))
    return pytest.approx((values / values.sum()).tolist())


async def test_vllms_shape():
    async with over_asgi(task=only(LABELS)) as server:
        response = await server.http.post("/classify", json={"input": ["ab", "c"]}, headers={"x-request-id": "mine"})
        answer = response.json()
        assert answer.pop("created") > 0
        best = [LABELS.labels[int(np.argmax(vector_of([*text])))] for text in (b"ab", b"c")]
        assert answer == {
            "id": "classify-mine",
            "object": "list",
            "model": "tiny",
            "data": [
                {"index": 0, "label": best[0], "probs": softmax([*b"ab"]), "num_classes": 4},
                {"index": 1, "label": best[1], "probs": softmax([*b"c"]), "num_classes": 4},
            ],
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }
        response = await server.http.post("/classify", json={"input": "ab", "use_activation": False})
        assert response.json()["data"][0]["probs"] == vector_of([*b"ab"]).tolist()


async def test_a_conversation_has_a_reward():
    """A reward model has no names of labels, and no activation."""
    async with over_asgi(task=only(REWARD)) as server:
        body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        [item] = (await server.http.post("/classify", json=body)).json()["data"]
        [request] = server.engine.submitted
        assert item["probs"] == vector_of(request.prompt_ids).tolist()
        assert item["label"].startswith("LABEL_")


@pytest.mark.parametrize("name", ["text", "input_ids"])
async def test_sglangs_fields_are_refused_with_advice(name: str):
    async with over_asgi(task=only(LABELS)) as server:
        error = await refusal(server, "/classify", **{name: [1]})
        assert error["param"] == name
        assert "/encode" in error["message"]


async def test_sglangs_encode():
    async with over_asgi(task=only(EMBED), engine={"cached_tokens": 1}) as server:
        answer = (await server.http.post("/encode", json={"text": "ab", "rid": "mine"})).json()
        assert answer["meta_info"].pop("e2e_latency") > 0
        assert answer == {
            "embedding": normalized([*b"ab"]),
            "meta_info": {
                "id": "mine",
                "finish_reason": {"type": "stop"},
                "prompt_tokens": 2,
                "completion_tokens": 0,
                "cached_tokens": 1,
            },
        }
        one = (await server.http.post("/encode", json={"text": ["ab"], "dimensions": 2})).json()
        assert [item["embedding"] for item in one] == [normalized([*b"ab"], 2)]
        for rid, names in (("r", ["r_0", "r_1"]), (["x", "y"], ["x", "y"])):
            both = (await server.http.post("/encode", json={"input_ids": [[97], [98]], "rid": rid})).json()
            assert [item["embedding"] for item in both] == [normalized([97]), normalized([98])]
            assert [item["meta_info"]["id"] for item in both] == names
    async with over_asgi(task=only(LABELS)) as server:
        assert (await server.http.post("/encode", json={"text": "ab"})).json()["embedding"] == softmax([*b"ab"])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text", "one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "one of text and input_ids"),
        ({"text": ""}, "text", "is empty"),
        ({"text": [["a", "b"]]}, "text[0]", "expected `str`"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 ids for 2 prompts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "its own id"),
        ({"text": "a", "image_data": "x"}, "image_data", "in a text"),
        ({"text": "a", "is_cross_encoder_request": True}, "is_cross_encoder_request", "/v1/score"),
        ({"text": "a", "dimensions": 5}, "dimensions", "[1, 4]"),
        ({"text": "a" * 513}, "text", "resulted in 513"),
    ],
)
async def test_refusals_of_encode(body: dict[str, Any], param: str, words: str):
    async with over_asgi(task=only(EMBED)) as server:
        error = await refusal(server, "/encode", **body)
        assert (error["param"], words in error["message"]) == (param, True), error
