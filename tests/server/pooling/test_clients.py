"""Public clients against a fake engine: OpenAI's, LangChain's, LiteLLM's and Cohere's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import over_socket
from tests.server.pooling.tasks import EMBED, RERANK, only
from tests.server.pooling.test_embeddings import normalized
from tests.server.pooling.test_scoring import pair_score

IMPORTS_NOISILY = pytest.mark.filterwarnings("ignore::UserWarning:pydantic", "ignore::UserWarning:litellm")


async def test_openais_client():
    """It asks for base64 unless it is told a format."""
    async with over_socket(task=only(EMBED)) as server, server.openai() as client:
        for more, count in (({}, 4), ({"encoding_format": "float"}, 4), ({"encoding_format": "base64"}, 4)):
            answer = await client.embeddings.create(model="tiny", input=["ab", "c"], **more)
            if more.get("encoding_format") != "base64":
                assert [len(item.embedding) for item in answer.data] == [count] * 2
                assert answer.data[0].embedding == normalized([*b"ab"])
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
        [cut] = (await client.embeddings.create(model="tiny", input="ab", dimensions=2)).data
        assert cut.embedding == normalized([*b"ab"], 2)


async def test_langchain_openai():
    """By default it sends ids of OpenAI's own tokenizer, which mean other texts here."""
    from langchain_openai import OpenAIEmbeddings

    async with over_socket(task=only(EMBED)) as server, httpx.AsyncClient() as http:
        embeddings = OpenAIEmbeddings(
            model="tiny",
            base_url=f"{server.url}/v1",
            api_key="none",
            check_embedding_ctx_length=False,
            http_async_client=http,
        )
        assert await embeddings.aembed_documents(["ab", "c"]) == [normalized([*b"ab"]), normalized([*b"c"])]
        assert await embeddings.aembed_query("ab") == normalized([*b"ab"])


@IMPORTS_NOISILY
@pytest.mark.parametrize(("provider", "dimensions"), [("hosted_vllm", 2), ("openai", None)])
async def test_litellms_embeddings(litellm: Any, provider: str, dimensions: int | None):
    async with over_socket(task=only(EMBED)) as server:
        answer = await litellm.aembedding(
            model=f"{provider}/tiny",
            input=["ab"],
            api_base=f"{server.url}/v1",
            api_key="none",
            dimensions=dimensions,
        )
        assert answer.data[0]["embedding"] == normalized([*b"ab"], dimensions)
        assert answer.usage.prompt_tokens == 2


@IMPORTS_NOISILY
@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai", "cohere"])
async def test_litellms_rerank(litellm: Any, provider: str):
    async with over_socket(task=only(RERANK)) as server:
        answer = await litellm.arerank(
            model=f"{provider}/tiny",
            query="q",
            documents=["a", "bc"],
            top_n=1,
            api_base=server.url,
            api_key="none",
        )
        expected = [pair_score([*b"q", *text]) for text in (b"a", b"bc")]
        [best] = answer.results
        assert best["relevance_score"] == pytest.approx(max(expected))
        assert expected[best["index"]] == pytest.approx(max(expected))


async def test_coheres_clients():
    import cohere

    expected = [pair_score([*b"q", *text]) for text in (b"a", b"bc")]
    best = expected.index(max(expected))
    async with over_socket(task=only(RERANK)) as server, httpx.AsyncClient() as http:
        newer = cohere.AsyncClientV2("none", base_url=server.url, httpx_client=http)
        answer = await newer.rerank(model="tiny", query="q", documents=["a", "bc"], top_n=1, max_tokens_per_doc=9)
        assert [(one.index, one.relevance_score) for one in answer.results] == [(best, pytest.approx(max(expected)))]
        assert answer.id
        assert answer.meta is not None
        assert answer.meta.billed_units is not None
        assert answer.meta.billed_units.search_units == 1
        older = cohere.AsyncClient("none", base_url=server.url, httpx_client=http)
        documents: list[Any] = [{"text": "a"}, {"text": "bc"}]
        old = await older.rerank(model="tiny", query="q", documents=documents, return_documents=True)
        assert [one.document.text for one in old.results if one.document] == [
            documents[index]["text"] for index in (best, 1 - best)
        ]
