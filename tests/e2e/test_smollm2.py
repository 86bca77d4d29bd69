"""SmolLM2's greedy tokens in float32 equal Hugging Face's, through the offline engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams

pytestmark = pytest.mark.slow

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json").read_text())


def test_greedy_tokens_equal_hugging_face() -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with LLM(dtype="float32", max_running_requests=8, context_length=512, chunked_prefill_size=128) as llm:
        outputs = llm.generate([case["prompt_ids"] for case in CASES], params, use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["output_ids"], case["name"]
