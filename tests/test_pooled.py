"""Checkpoints of pooled requests through the real engine: wherever their chunks end, vectors are those of transformers
and sentence-transformers. tests/test_keystone.py has pooled requests between chats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.worker import build_engine
from tests.models.pooled import FOLDERS, SETTINGS, cases, pooled_source
from tests.tiny_model import of_this_run

pytestmark = pytest.mark.slow


def embed(loop: EngineLoop, prompts: list[list[int]]) -> list[np.ndarray]:
    """Return the vectors of texts that come together."""
    for i, ids in enumerate(prompts):
        sampling = SamplingParams(max_tokens=0)
        assert loop.add(EngineRequest(request_id=f"r{i}", prompt_ids=ids, sampling=sampling, pooled=True)) is None
    found: dict[str, np.ndarray] = {}
    while loop.has_work:
        for event in loop.step():
            assert event.pooled is not None
            found[event.request_id] = np.frombuffer(event.pooled, np.float32)
    assert loop.stats(check=True).integrity_errors == ()
    return [found[f"r{i}"] for i in range(len(prompts))]


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_do_not_depend_on_where_chunks_end(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    programs = of_this_run(tmp_path_factory) / "pooled-programs"
    programs.mkdir(exist_ok=True)
    own = cases(name)
    common: dict[str, Any] = {
        "model": str(pooled_source(name).path), "dtype": "float32", "device": "cpu", "max_running_requests": 4,
        "chunked_prefill_size": 16, "context_length": 96, "page_size": 4, "program_cache_dir": str(programs),
    } | SETTINGS.get(name, {})  # fmt: skip
    for most in (1, 5, 16):
        loop, info = build_engine(EngineConfig(**common, max_prefill_tokens=most))
        assert info.num_programs == 2, "one step, and the opening of slots"
        for _ in range(2):  # the second time, prefixes are cached
            for case, vector in zip(own, embed(loop, [case.ids for case in own]), strict=True):
                np.testing.assert_allclose(vector, case.vector, atol=1e-4)
        assert loop.stats().compiles_after_ready == 0


def test_bits_in_bfloat16_do_not_depend_on_company_or_chunks(tmp_path: Path) -> None:
    """The mean is added up in the order of tokens."""
    rng, found = np.random.default_rng(0), []
    prompts = [rng.integers(0, 250, size).tolist() for size in (1, 9, 33, 61)]
    for most, together in ((16, True), (5, True), (16, False)):
        config = EngineConfig(
            model=str(pooled_source("qwen3_embedding").path), pooling="mean", load_format="dummy", device="cpu",
            max_running_requests=4, chunked_prefill_size=16, context_length=96, page_size=4, max_prefill_tokens=most,
            program_cache_dir=str(tmp_path),
        )  # fmt: skip
        loop, _ = build_engine(config)
        found.append(embed(loop, prompts) if together else [embed(loop, [prompt])[0] for prompt in prompts])
    for vectors in found[1:]:
        for one, other in zip(vectors, found[0], strict=True):
            assert one.tobytes() == other.tobytes()
