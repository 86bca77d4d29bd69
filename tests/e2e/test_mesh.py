"""The real server on a mesh of simulated devices answers as with one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import serving
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.process

FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--context-length", "64",
         "--max-running-requests", "4", "--cuda-graph-bs", "4", "--chunked-prefill-size", "16",
         "--page-size", "4", "--max-total-tokens", "256", "--disable-program-cache"]  # fmt: skip
DEVICES = "--xla_force_host_platform_device_count=8"
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XLA_FLAGS", f"{DEVICES} --xla_backend_optimization_level=0")
    return str(write_tiny_model(tmp_path))


async def _answers(url: str) -> list[dict[str, Any]]:
    """Of prompts that share beginnings, all at once."""
    prompts = [[(7 * i + j * (i // 3)) % (VOCAB_SIZE - 2) for j in range(5 + 2 * i)] for i in range(18)]
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        asked = [
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, **SAMPLING[i % len(SAMPLING)]})
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json()["choices"][0] for answer in answers]


@pytest.mark.grid
def test_it_answers_as_one_device_does(model: str) -> None:
    with serving(model, *FLAGS) as server:
        alone = asyncio.run(_answers(server.url))
    with serving(
        model, *FLAGS, "--tensor-parallel-size", "2", "--data-parallel-size", "2", "--dp-mode", "mesh"
    ) as server:
        info = server.info()
        together = asyncio.run(_answers(server.url))
        flushed = httpx.post(f"{server.url}/flush_cache").text
        metrics = httpx.get(f"{server.url}/metrics").text
        assert server.terminate() == 0
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    for one, two in zip(alone, together):
        assert (one["logprobs"] is None) == (two["logprobs"] is None)
        if one["logprobs"] is not None:
            assert one["logprobs"]["token_logprobs"] == pytest.approx(two["logprobs"]["token_logprobs"], abs=1e-4)
    assert info["engine"]["max_total_num_tokens"] == 512
    assert any("4 (data parallel 2 x tensor parallel 2) x cpu" in line for line in server.log), server.log
    assert "Cache flushed" in flushed
    assert "jaxserve" in metrics


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (["--tp-size", "3"], "the nearest that can: --tp-size 2 or --tp-size 4"),
        (
            ["--tp-size", "4", "--dp-size", "4", "--dp-mode", "mesh"],
            "take 16 devices, and there are 8; what fits: --tp-size 4 --dp-size 2 or --tp-size 2 --dp-size 4; "
            "XLA_FLAGS=--xla_force_host_platform_device_count=16",
        ),
    ],
)
def test_a_mesh_that_can_not_be_is_refused_at_the_start(sizes: list[str], says: str, model: str) -> None:
    command = [sys.executable, "-m", "jaxserve", "serve", model, "--port", "0", *FLAGS, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
