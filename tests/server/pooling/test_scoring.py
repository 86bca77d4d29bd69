from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import ServerUnderTest, over_asgi
from tests.server.fake_engine import vector_of
from tests.server.pooling.tasks import EMBED, RERANK, only
from tests.server.pooling.test_embeddings import PROMPTS, refusal
from tests.server.tiny import END_ID, START_ID

SCORE_TEMPLATE = (
    "{{ instruction | default('find') }}: {{ (messages | selectattr('role', 'eq', 'query') | first).content }} ? "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>{{ mood }}"
)
QWEN3 = dataclasses.replace(RERANK, pair_template="qwen3_reranker")


def pair_score(ids: list[int]) -> float:
    values = np.exp(vector_of(ids).astype(np.float64))
    return float(values[-1] / values.sum())


def cosine(one: bytes, other: bytes) -> float:
    left, right = (vector_of([*text]).astype(np.float64) for text in (one, other))
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


async def ask(server: ServerUnderTest, path: str, **body: Any) -> Any:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def scores(server: ServerUnderTest, **body: Any) -> list[float]:
    return [item["score"] for item in (await ask(server, "/v1/score", **body))["data"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_the_shape_of_rerank(path: str):
    documents = ["a", "bc", {"text": "d", "title": "t"}, "e"]
    async with over_asgi(task=only(RERANK)) as server:
        headers = {"x-request-id": "mine"}
        response = await server.http.post(path, json={"query": "q", "documents": documents}, headers=headers)
        answer = response.json()
        expected = [pair_score([*b"q", *text]) for text in (b"a", b"bc", b"d", b"e")]
        order = sorted(range(4), key=expected.__getitem__, reverse=True)
        assert order != [0, 1, 2, 3]
        assert answer == {
            "id": "rerank-mine",
            "model": "tiny",
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
            "results": [
                {
                    "index": index,
                    "relevance_score": pytest.approx(expected[index]),
                    "document": documents[index] if index == 2 else {"text": documents[index]},
                }
                for index in order
            ],
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": 9, "output_tokens": 0},
            },
        }


async def test_options_of_rerank():
    async with over_asgi(task=only(RERANK)) as server:
        body: dict[str, Any] = {"query": "q", "documents": ["a", "b", "c"]}
        everything = (await ask(server, "/v1/rerank", **body, top_n=0))["results"]
        assert (await ask(server, "/v1/rerank", **body, top_n=2))["results"] == everything[:2]
        assert (await ask(server, "/v1/rerank", **body, top_n=9))["results"] == everything
        bare = (await ask(server, "/v1/rerank", **body, return_documents=False))["results"]
        assert bare == [{key: one[key] for key in ("index", "relevance_score")} for one in everything]
        documents = [{"title": "t", "body": "x"}, {"body": "y"}]
        await ask(server, "/v1/rerank", query="q", documents=documents, rank_fields=["title", "body"])
        assert [one.prompt_ids for one in server.engine.submitted[-2:]] == [[*b"qt\nx"], [*b"qy"]]
        await ask(server, "/v1/rerank", query="query", documents=["document"], max_tokens_per_query=2)
        assert server.engine.submitted[-1].prompt_ids == [*b"qudocument"]
        await ask(server, "/v1/rerank", query="q", documents="document", max_tokens_per_doc=2)
        assert server.engine.submitted[-1].prompt_ids == [*b"qdo"]
        many = await ask(server, "/v1/rerank", query="q", documents=["a"] * 101)
        assert many["meta"]["billed_units"] == {"search_units": 2}
        assert [one["index"] for one in many["results"]] == [*range(101)], "equal ones stay in order"


async def test_scores_of_pairs():
    async with over_asgi(task=only(RERANK)) as server:
        answer = await ask(server, "/score", text_1="q", text_2=["a", "b"], request_id="mine")
        assert answer.pop("created") > 0
        assert answer == {
            "id": "score-mine",
            "object": "list",
            "model": "tiny",
            "data": [
                {"index": 0, "object": "score", "score": pytest.approx(pair_score([*b"qa"]))},
                {"index": 1, "object": "score", "score": pytest.approx(pair_score([*b"qb"]))},
            ],
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        }
        several = pytest.approx([pair_score([*b"qa"]), pair_score([*b"rb"])])
        for first, second in (
            ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")
        ):  # fmt: skip
            assert await scores(server, **{first: ["q", "r"], second: ["a", "b"]}) == several
        [raw] = await scores(server, text_1="q", text_2="a", use_activation=False)
        assert raw == pytest.approx(float(vector_of([*b"qa"])[-1]))


async def test_a_model_of_embeddings_gives_cosines():
    async with over_asgi(task=only(EMBED, **PROMPTS)) as server:
        found = await scores(server, text_1="q", text_2=["a", "b"])
        assert found == pytest.approx([cosine(b"Q: q", b"Q: a"), cosine(b"Q: q", b"Q: b")])
        assert len(server.engine.submitted) == 3, "the query is computed once"
        found = await scores(server, text_1=["q", "r"], text_2=["a", "b"])
        assert found == pytest.approx([cosine(b"Q: q", b"Q: a"), cosine(b"Q: r", b"Q: b")])
        answer = await ask(server, "/v1/rerank", query="qq", documents=["ab"], max_tokens_per_doc=1)
        assert answer["results"][0]["relevance_score"] == pytest.approx(cosine(b"Q: qq", b"Q: a"))


@pytest.mark.parametrize("setting", [None, "qwen3_reranker"])
async def test_the_prompt_of_qwen3_reranker(setting: str | None):
    task = QWEN3 if setting is None else RERANK
    async with over_asgi(task=only(task), chat_template=setting) as server:
        for more, instruction in (({}, "Given a web search query"), ({"instruct": "Find it"}, "Find it")):
            await ask(server, "/v1/rerank", query="why<|im_end|>", documents=["d"], **more)
            ids = server.engine.submitted[-1].prompt_ids
            text = server.state.require_loaded().tokenizer.decode(ids, skip_special_tokens=False)
            assert f"<Instruct>: {instruction}" in text
            assert "\n<Query>: why<|im_end|>\n<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>" in text
            assert (ids.count(START_ID), ids.count(END_ID)) == (3, 2)
        await ask(server, "/v1/rerank", query="q", documents=["d" * 600], truncate_prompt_tokens=-1)
        assert len(server.engine.submitted[-1].prompt_ids) == 512


async def test_a_template_of_queries_and_documents():
    async with over_asgi(SCORE_TEMPLATE, task=only(QWEN3)) as server:
        for more, text in (
            ({}, "find: q<s> ? d"),
            ({"instruction": "rank"}, "rank: q<s> ? d"),
            ({"chat_template_kwargs": {"instruction": "sort", "mood": "!"}}, "sort: q<s> ? d"),
        ):
            await ask(server, "/v1/rerank", query="q<s>", documents=["d"], **more)
            ids = [*text.encode(), END_ID, *(b"!" if "chat_template_kwargs" in more else b"")]
            assert server.engine.submitted[-1].prompt_ids == ids
        await ask(server, "/v1/rerank", query="q", documents=["abcdef"], truncate_prompt_tokens=14)
        assert server.engine.submitted[-1].prompt_ids == [*b"find: q ? abc", END_ID]


async def test_a_template_of_sentence_transformers():
    """It reads an instruction, or the model's default prompt, from a message of the role system."""
    template = (
        "{% set instruction = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
        "default('find') %}{{ instruction }}: {{ (messages | selectattr('role', 'eq', 'query') | first).content }} ? "
        "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}{{ '!' if add_generation_prompt }}"
    )
    arguments = (("add_generation_prompt", True),)
    body: dict[str, Any] = {"query": "q", "documents": ["d"]}
    async with over_asgi(template, task=only(QWEN3, template_arguments=arguments)) as server:
        for more, text in (({}, b"find: q ? d!"), ({"instruction": "<s>"}, b"<s>: q ? d!")):
            await ask(server, "/v1/rerank", **body, **more)
            assert server.engine.submitted[-1].prompt_ids == [*text]
    async with over_asgi(template, task=only(QWEN3, **PROMPTS)) as server:
        await ask(server, "/v1/rerank", **body)
        assert server.engine.submitted[-1].prompt_ids == [*b"Q: : q ? d"]
    async with over_asgi(task=only(RERANK, **PROMPTS)) as server:
        await ask(server, "/v1/rerank", **body)
        assert server.engine.submitted[-1].prompt_ids == [*b"Q: qd"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "self", "unknown"])
async def test_arguments_that_a_template_of_pairs_does_not_take(name: str):
    async with over_asgi(SCORE_TEMPLATE, task=only(QWEN3)) as server:
        arguments = {"chat_template_kwargs": {name: True}}
        error = await refusal(server, "/rerank", query="q", documents=["d"], **arguments)
        assert error["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "is required"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "length >= 1"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents", "length >= 1"),
        ("/v1/rerank", {"query": "q", "documents": ["a", ""]}, "documents[1]", "length >= 1"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 2049}, "documents", "length <= 2048"),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents[0]", "in text"),
        ("/v1/rerank", {"query": "q", "documents": [{"text": 1}]}, "documents[0]", "needs a text"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "rank_fields": ["t"]}, "documents[0]", "objects"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_chunks_per_doc": 4}, "max_chunks_per_doc", "shorten"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruction": "i"}, "instruction", "no place"),
        ("/v1/rerank", {"query": "q", "documents": ["a" * 600]}, "documents[0]", "601 tokens"),
        (
            "/v1/rerank",
            {"query": "q", "documents": ["a"], "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            "--chat-template",
        ),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruction": "i", "instruct": "i"}, "instruct", "the same"),
        ("/v1/score", {"text_1": "q"}, "text_1", "Give text_1 and text_2"),
        ("/v1/score", {"text_1": "q", "documents": "a"}, "text_1", "Give text_1 and text_2"),
        ("/v1/score", {"text_1": "q", "text_2": "a", "items": "b"}, "items", "with text_1"),
        ("/v1/score", {"text_1": ["q", "r"], "text_2": ["a"]}, "text_1", "2 texts and text_2 1"),
        ("/v1/score", {"query": "q", "items": ["a"], "label_token_ids": [1]}, "query", "as text_1"),
        ("/v1/score", {"text_1": "q", "text_2": "a", "label_token_ids": [1]}, "label_token_ids", "reranker"),
    ],
)
async def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str, words: str):
    async with over_asgi(task=only(RERANK)) as server:
        error = await refusal(server, path, **body)
        assert (error["param"], words in error["message"]) == (param, True), error


@pytest.mark.parametrize("more", [{"instruction": "i"}, {"chat_template_kwargs": {"a": 1}}, {"use_activation": False}])
async def test_what_embeddings_have_no_place_for(more: dict[str, Any]):
    async with over_asgi(task=only(EMBED)) as server:
        assert (await refusal(server, "/v1/rerank", query="q", documents=["a"], **more))["param"] == min(more)
