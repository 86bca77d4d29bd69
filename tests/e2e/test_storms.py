"""A server with a tiny DeepSeek-V3, or a hybrid: a storm of requests, each of which gets Hugging Face's token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
import tokenizers

from jaxserve.text.tokenizers.token_bytes import byte_alphabet
from tests.e2e.server_process import serving
from tests.models.golden import GOLDEN
from tests.selection import grid

pytestmark = pytest.mark.process

# So little memory that requests are retracted, and come back from host memory
FLAGS = ["--dtype", "float32", "--page-size", "16", "--max-total-tokens", "192", "--enable-hierarchical-cache"]
FLAGS += ["--hicache-ratio", "4", "--chunked-prefill-size", "16", "--max-running-requests", "4", "--cuda-graph-bs", "4"]
FLAGS += ["--context-length", "96", "--schedule-conservativeness", "0.1"]
FORMS = {
    "absorbed": ("deepseek_v3", []),
    "expanded": ("deepseek_v3", ["--attention-backend", "reference", "--chunked-prefill-size", "128"]),
    "states": ("qwen3_5", ["--max-mamba-cache-size", "8", "--speculative-algorithm", "NGRAM"]),
}


def _write_model(fixture: str, folder: Path) -> Path:
    """Write the fixture with a tokenizer for its 128 ids."""
    shutil.copytree(GOLDEN / fixture, folder, dirs_exist_ok=True)
    vocab = {char: value for value, char in byte_alphabet().items() if value < 128}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


def _known_tokens(fixture: str) -> list[tuple[list[int], int]]:
    """Return every prefix of the fixture's prompts, and Hugging Face's greedy token after it."""
    known = np.load(GOLDEN / fixture / "golden.npz")
    return [
        (known[f"ids_{i}"][: end + 1].tolist(), int(known[f"logits_{i}"][end].argmax()))
        for i in range(3)
        for end in range(len(known[f"ids_{i}"]))
    ]


@pytest.mark.parametrize("form", grid(FORMS, lambda form: form != "expanded"))
def test_each_request_of_a_storm_gets_hugging_faces_token(form: str, tmp_path: Path) -> None:
    rng, (fixture, flags) = random.Random(form), FORMS[form]
    asked = _known_tokens(fixture) * 2
    rng.shuffle(asked)

    async def storm(url: str) -> list[tuple[int, int]]:
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

            async def ask(prompt: list[int], token: int) -> tuple[int, int]:
                more = rng.choice([1, 1, 30])
                body = {"model": "m", "prompt": prompt, "max_tokens": more, "temperature": 0, "ignore_eos": True}
                response = await client.post("/v1/completions", json=body | {"return_token_ids": True})
                ids = response.json()["choices"][0]["token_ids"]
                assert len(ids) == more, response.text
                return ids[0], token

            async def hang_up(prompt: list[int]) -> None:
                body = {"model": "m", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True}
                with contextlib.suppress(httpx.TimeoutException):
                    await client.post("/v1/completions", json=body, timeout=rng.uniform(0.05, 0.5))

            answers = [asyncio.create_task(ask(*one)) for one in asked]
            hung_up = [asyncio.create_task(hang_up(prompt)) for prompt, _ in asked[::8]]
            await asyncio.gather(*hung_up)
            return await asyncio.gather(*answers)

    model = _write_model(fixture, tmp_path / "model")
    with serving(str(model), "--served-model-name", "m", *FLAGS, *flags) as server:
        for _ in range(3):  # what comes back from host memory depends on who hangs up when
            for found, expected in asyncio.run(storm(server.url)):
                assert found == expected
            stats = server.info()["stats"]
            if stats["host_load_pages"] and stats["num_preemptions"]:
                break
        assert stats["num_preemptions"] > 0
        assert stats["cache_hit_tokens"] > 0
        assert stats["host_load_pages"] > 0
        assert stats["integrity_errors"] == []
