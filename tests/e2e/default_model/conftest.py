"""The default model, served once for all files of tests in this folder, by two API processes, with drafts and for
embeddings, too: answers depend on none of these."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server_process import ServerProcess, serving


@pytest.fixture(scope="package")
def server() -> Iterator[ServerProcess]:
    both = "--runner", "generate", "--convert", "embed"
    with serving("--speculative-method", "ngram", "--api-server-count", "2", *both) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
