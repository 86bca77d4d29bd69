"""How the two processes end: killed engine, SIGTERM under load."""

from __future__ import annotations

import contextlib
import signal
import threading

import httpx
import openai
import pytest

from tests.e2e.server_process import kill, serving
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.process

FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--context-length", "1024",
         "--max-running-requests", "4", "--cuda-graph-bs", "4", "--chunked-prefill-size", "32",
         "--max-total-tokens", "4096", "--served-model-name", "tiny"]  # fmt: skip
MODEL = "tiny"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model and its settings; the second server loads the programs of the first."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    return [str(folder), *FLAGS, "--program-cache-dir", f"{folder}/programs"]


def test_a_killed_engine_ends_every_request_and_the_server(flags: list[str]) -> None:
    with serving(*flags) as server:
        [_, engine] = server.family()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with (
            client,
            client.completions.create(
                model=MODEL, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            ) as stream,
        ):
            next(iter(stream))
            kill(engine)
            with pytest.raises(openai.APIError, match="engine"):
                list(stream)
        with contextlib.suppress(httpx.TransportError):  # it may be gone already
            assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.wait() != 0
        assert any("engine process" in line for line in server.log), server.log


def test_sigterm_drains(flags: list[str]) -> None:
    with serving(*flags) as server:
        texts: list[str] = []
        started = threading.Event()

        def ask() -> None:
            with (
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
                client.completions.create(
                    model=MODEL, prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
                ) as stream,
            ):
                for chunk in stream:
                    texts.append(chunk.choices[0].finish_reason or "")
                    started.set()

        thread = threading.Thread(target=ask)
        thread.start()
        started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert texts[-1] == "length"
        assert server.wait() == 0
