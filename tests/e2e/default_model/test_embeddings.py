"""Embeddings of the default model beside its chats, as public clients ask for them."""

from __future__ import annotations

import asyncio
import random

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.process

MODEL = "smollm2-135m-instruct"
TEXTS = [" ".join(f"word{i * j}" for j in range(3 + 7 * i)) for i in range(12)]


def test_public_clients_get_the_same_vectors(server: ServerProcess, client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64
    vectors = np.array([each.embedding for each in plain.data], np.float32)
    assert vectors.shape == (12, 576)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert [each.index for each in plain.data] == list(range(12))
    np.testing.assert_array_equal(vectors, np.array([each.embedding for each in packed.data], np.float32))
    short = client.embeddings.create(model=MODEL, input=TEXTS[3], dimensions=64).data[0].embedding
    np.testing.assert_allclose(short, vectors[3, :64] / np.linalg.norm(vectors[3, :64]), atol=1e-6)

    chain = OpenAIEmbeddings(model=MODEL, base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False)  # type: ignore[call-arg]
    np.testing.assert_array_equal(np.array(chain.embed_documents(TEXTS[:2]), np.float32), vectors[:2])


async def test_a_crowd_of_embeddings_and_chats_of_which_a_third_hangs_up(server: ServerProcess) -> None:
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

        async def embed(texts: list[str]) -> list[list[float]]:
            answer = await http.post("/v1/embeddings", json={"input": texts})
            assert answer.status_code == 200, answer.text
            return [each["embedding"] for each in answer.json()["data"]]

        async def chat(number: int) -> str:
            body = {"prompt": f"{number}: the", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        async def hang_up(number: int) -> None:
            task = asyncio.create_task(embed(TEXTS * 4) if number % 2 else chat(number))
            await asyncio.sleep(rng.random() / 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        alone = [(await embed([text]))[0] for text in TEXTS]
        said = [await chat(number) for number in range(4)]
        chosen = [rng.sample(range(12), rng.randint(1, 12)) for _ in range(12)]
        found, answers, _ = await asyncio.gather(
            asyncio.gather(*(embed([TEXTS[i] for i in some]) for some in chosen)),
            asyncio.gather(*(chat(number) for number in range(4))),
            asyncio.gather(*(hang_up(number) for number in range(8))),
        )
        assert answers == said
        assert found == [[alone[i] for i in some] for some in chosen]
        info = (await http.get("/server_info")).json()
        assert info["stats"]["integrity_errors"] == []
