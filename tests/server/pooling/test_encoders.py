"""A server of an encoder, whose tokenizer is a BERT's: texts are cut to the model's limit, and pairs have two types."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.model_source import ModelSource
from jaxserve.model_source.pooling import ModelTask, Pooling
from jaxserve.text.tokenizers.tokenizer import load_tokenizer
from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.fake_engine import vector_of
from tests.server.pooling.tasks import EMBED, RERANK, both, only
from tests.server.pooling.test_embeddings import refusal
from tests.server.pooling.test_scoring import ask

BERT = Path(__file__).parents[2] / "fixtures" / "text" / "encoders" / "bert"
TOKENIZER = load_tokenizer(ModelSource(BERT, "folder", "bert"))
CLS, SEP = TOKENIZER.encode("")
LONG = "the engine and its state, and whichever requests wait"
BY_TOKEN = dataclasses.replace(EMBED, pooling=Pooling("all"))


def encoder(task: Any, **settings: Any) -> Any:
    engine = settings.pop("engine", {}) | {"vocab_size": TOKENIZER.vocab_size}
    return over_asgi(None, task=task, tokenizer=TOKENIZER, engine=engine, **settings)


def prompts(server: ServerUnderTest) -> list[list[int]]:
    return [request.prompt_ids for request in server.engine.submitted]


def vectors_of(ids: Sequence[int]) -> np.ndarray:
    """Return a vector for each token, as a model with the pooling `all` does."""
    return np.stack([vector_of([*ids[: at + 1]]) for at in range(len(ids))])


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(("path", "name"), [("/v1/embeddings", "input"), ("/pooling", "input"), ("/encode", "text")])
async def test_a_longer_text_loses_its_end_but_not_its_last_token(path: str, name: str):
    whole = TOKENIZER.encode(LONG)
    assert len(whole) > 9
    async with encoder(only(EMBED, max_tokens=6)) as server:
        answer = await ask(server, path, **{name: [LONG, "a"]})
        assert prompts(server) == [[*whole[:5], SEP], TOKENIZER.encode("a")]
        if path != "/encode":
            assert answer["usage"]["prompt_tokens"] == 6 + 3


async def test_how_far_texts_are_cut():
    whole = TOKENIZER.encode(LONG)
    async with encoder(only(EMBED, max_tokens=8)) as server:
        for more, ids in (
            ({}, [*whole[:7], SEP]),
            ({"truncation_side": "left"}, [CLS, *whole[-7:]]),
            ({"truncate_prompt_tokens": 5}, [*whole[:4], SEP]),
            ({"truncate_prompt_tokens": 100}, [*whole[:7], SEP]),
        ):
            await ask(server, "/v1/embeddings", input=LONG, **more)
            assert prompts(server)[-1] == ids
        await ask(server, "/v1/embeddings", input=whole, truncate_prompt_tokens=5)
        assert prompts(server)[-1] == whole[:5]
    async with encoder(only(EMBED, max_tokens=8)) as server:
        error = await refusal(server, input=whole)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    for task, longest in ((EMBED, 9), (dataclasses.replace(EMBED, max_tokens=10), 9)):
        async with encoder(only(task), engine={"max_model_len": longest}) as server:
            assert "maximum context length is 9" in (await refusal(server, input=LONG))["message"]


@pytest.mark.parametrize(
    ("task", "longest"), [(only(EMBED, max_tokens=8), 8), (only(EMBED), 64), (both(EMBED, max_tokens=8), 64)]
)
async def test_the_context_that_clients_see_is_the_limit_of_texts(task: ModelTask, longest: int):
    async with encoder(task, engine={"max_model_len": 64}) as server:
        models = (await server.http.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == longest
        assert (await ask(server, "/tokenize", prompt="a"))["max_model_len"] == longest
        assert (await server.http.get("/get_server_info")).json()["context_length"] == longest


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_where_the_second_text_of_a_pair_begins(path: str):
    body = {"query": "a", "documents": ["b", LONG]} if path == "/v1/rerank" else {"text_1": "a", "text_2": ["b", LONG]}
    async with encoder(only(RERANK, max_tokens=8)) as server:
        await ask(server, path, **body)
        a, b = TOKENIZER.encode("a")[1], TOKENIZER.encode("b")[1]
        assert prompts(server) == [[CLS, a, SEP, b, SEP], [CLS, a, SEP, *TOKENIZER.encode(LONG)[1:5], SEP]]
        assert [request.second_start for request in server.engine.submitted] == [3, 3]
        await ask(server, "/pooling", input="a")
        assert server.engine.submitted[-1].second_start is None


async def test_texts_that_spell_special_tokens_have_them_as_with_transformers():
    async with encoder(only(EMBED)) as server:
        await ask(server, "/v1/embeddings", input="a [SEP]")
        assert prompts(server) == [[*TOKENIZER.encode("a"), SEP]]


async def test_tokens_and_texts():
    async with encoder(only(EMBED)) as server:
        found = await ask(server, "/tokenize", prompt="Engines", return_token_strs=True)
        assert found["tokens"] == TOKENIZER.encode("engines")
        assert (found["token_strs"][0], found["token_strs"][-1]) == ("[CLS]", "[SEP]")
        text = await ask(server, "/detokenize", tokens=found["tokens"])
        assert text == {"prompt": "[CLS] engines [SEP]"}


async def test_a_conversation_needs_a_chat_template():
    async with encoder(only(EMBED)) as server:
        error = await refusal(server, messages=[{"role": "user", "content": "a"}])
        assert "chat template" in error["message"]


async def test_vectors_of_tokens():
    ids = TOKENIZER.encode("ab")
    async with encoder(only(BY_TOKEN), engine={"vector": vectors_of}) as server:
        for path, body in (("/pooling", {"input": "ab"}), ("/pooling", {"input": "ab", "task": "token_embed"})):
            [found] = (await ask(server, path, **body))["data"]
            assert np.asarray(found["data"]) == pytest.approx(unit(vectors_of(ids)), rel=1e-6)
        found = await ask(server, "/encode", text="ab")
        assert np.asarray(found["embedding"]) == pytest.approx(unit(vectors_of(ids)), rel=1e-6)
        [raw] = (await ask(server, "/pooling", input="ab", normalize=False, encoding_format="base64"))["data"]
        assert base64.b64decode(raw["data"]) == vectors_of(ids).tobytes()
        [cut] = (await ask(server, "/pooling", input="ab", dimensions=2))["data"]
        assert np.asarray(cut["data"]) == pytest.approx(unit(vectors_of(ids)[:, :2]), rel=1e-6)


async def test_late_interaction_scores_pairs():
    async with encoder(only(BY_TOKEN), engine={"vector": vectors_of}) as server:
        answer = await ask(server, "/v1/score", text_1="a", text_2=["b", LONG])
        query, *documents = (unit(vectors_of(TOKENIZER.encode(text))) for text in ("a", "b", LONG))
        expected = [float((query @ document.T).max(axis=1).sum()) for document in documents]
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected)
        best = (await ask(server, "/v1/rerank", query="a", documents=["b", LONG]))["results"]
        assert [one["relevance_score"] for one in best] == pytest.approx(sorted(expected, reverse=True))


async def test_what_makes_vectors_of_tokens_makes_none_of_texts():
    async with encoder(only(BY_TOKEN)) as server:
        assert "a vector of each token" in (await refusal(server, input="a"))["message"]
        error = await refusal(server, "/pooling", input="a", task="embed")
        assert "does token_embed, not embed" in error["message"]
