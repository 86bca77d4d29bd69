"""The real all-MiniLM-L6-v2, beside sentence-transformers (make_minilm_fixture.py), and as public clients use it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from jaxserve import LLM
from tests.e2e.server_process import ServerProcess, serving
from tests.server.pooling.test_clients import IMPORTS_NOISILY

pytestmark = pytest.mark.process

MODEL = "all-minilm-l6-v2"
REFERENCE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "minilm.json").read_text("utf-8"))
TEXTS, DOCUMENTS, QUERIES = REFERENCE["texts"], REFERENCE["documents"], REFERENCE["queries"]
VECTORS = np.stack([np.frombuffer(base64.b64decode(text), "<f4") for text in REFERENCE["vectors"]])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(MODEL, "--dtype", "float32", "--context-length", "512", "--chunked-prefill-size", "256") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(client: openai.OpenAI, texts: list[str]) -> np.ndarray:
    return np.array([each.embedding for each in client.embeddings.create(model=MODEL, input=texts).data], np.float32)


def test_vectors_are_those_of_sentence_transformers(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = np.array([each.embedding for each in answer.data], np.float32)
    assert (vectors * VECTORS).sum(axis=1).min() > 0.99999
    assert answer.usage.prompt_tokens == sum(REFERENCE["num_tokens"])
    np.testing.assert_array_equal(vectors[::-1], embed(client, TEXTS[::-1]))


def test_vectors_in_bfloat16() -> None:
    with LLM(MODEL, dtype="bfloat16", context_length=256, chunked_prefill_size=256) as llm:
        vectors = np.array([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
        assert (vectors * VECTORS).sum(axis=1).min() > 0.999
        [score] = llm.score(QUERIES[0], DOCUMENTS[1], use_tqdm=False)
        assert score.outputs.score > llm.score(QUERIES[0], DOCUMENTS[2], use_tqdm=False)[0].outputs.score


def test_a_retrieval_ranks_as_with_sentence_transformers(server: ServerProcess, client: openai.OpenAI) -> None:
    scores = embed(client, QUERIES) @ embed(client, DOCUMENTS).T
    assert np.argsort(-scores, axis=1, kind="stable").tolist() == REFERENCE["ranking"]
    for query, ranking, own in zip(QUERIES[:3], REFERENCE["ranking"], scores):
        body = {"model": MODEL, "query": query, "documents": DOCUMENTS}
        results = httpx.post(f"{server.url}/v1/rerank", json=body).json()["results"]
        assert [each["index"] for each in results] == ranking
        np.testing.assert_allclose([each["relevance_score"] for each in results], own[ranking], atol=1e-5)


@IMPORTS_NOISILY
async def test_public_clients(server: ServerProcess, client: openai.OpenAI, litellm: Any) -> None:
    texts = QUERIES[:2]
    expected = embed(client, texts)
    chain = OpenAIEmbeddings(model=MODEL, base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False)  # type: ignore[call-arg]
    np.testing.assert_array_equal(np.array(chain.embed_documents(texts), np.float32), expected)
    found = await litellm.aembedding(f"hosted_vllm/{MODEL}", input=texts, api_base=f"{server.url}/v1", api_key="none")
    np.testing.assert_array_equal(np.array([each["embedding"] for each in found.data], np.float32), expected)
    with httpx.Client() as http:
        reranker = cohere.ClientV2("none", base_url=server.url, httpx_client=http)
        best = reranker.rerank(model=MODEL, query=QUERIES[0], documents=DOCUMENTS, top_n=3)
    assert [each.index for each in best.results] == REFERENCE["ranking"][0][:3]


def test_what_an_encoder_does_not_do_is_refused(server: ServerProcess) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": "a"}),
        ("/classify", {"input": "a"}),
    ):
        answer = httpx.post(f"{server.url}{path}", json=body)
        assert answer.status_code == 400
        assert "this model makes embeddings, on /v1/embeddings" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health_generate").status_code == 200
    info = httpx.get(f"{server.url}/model_info").json()
    assert not info["is_generation"]
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 256
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": [[2000] * 257]})
    assert "maximum context length is 256" in answer.json()["error"]["message"]
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"] == "[CLS] hello [SEP]"
