"""SmolLM2 in float32, through the offline engine: Hugging Face's greedy tokens; draws that company doesn't change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams

pytestmark = pytest.mark.slow

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2_greedy.json").read_text())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        dtype="float32",
        max_running_requests=8,
        cuda_graph_bs=[8],
        context_length=512,
        chunked_prefill_size=64,
    ) as llm:
        yield llm


def test_greedy_tokens_equal_hugging_face(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([case["prompt_ids"] for case in CASES], params, use_tqdm=False)
    for case, output in zip(CASES, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["output_ids"], case["name"]


@pytest.mark.grid
def test_a_seeded_draw_is_the_same_alone_and_in_a_full_batch(llm: LLM) -> None:
    prompt = CASES[0]["prompt_ids"]
    seeded = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
    [alone] = llm.generate([prompt], seeded, use_tqdm=False)
    others = [SamplingParams(max_tokens=16 + 8 * i, temperature=1.0, seed=i, ignore_eos=True) for i in range(7)]
    crowd = llm.generate([prompt, *(case["prompt_ids"] for case in CASES[1:])], [seeded, *others], use_tqdm=False)
    assert crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids
