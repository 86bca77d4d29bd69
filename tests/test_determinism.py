"""`--enable-deterministic-inference` over the real engine: a request's tokens and log probabilities, to the last bit,
alone and in a crowd whose prompts are cut, cached, preempted and computed again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError
from tests.selection import examples, grid
from tests.tiny_model import CONFIG, write_tiny_model

pytestmark = pytest.mark.slow

# Sizes that our kernels take; the context goes beyond a chunk of attention.
SIZES = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
# Layers that keep states
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "enable_deterministic_inference": True,
    "max_running_requests": 12,
}
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(CONFIG | SIZES))
    return folder


def _requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(4)
    shared = [rng.randrange(256) for _ in range(100)]
    requests = []
    for i in range(examples(32, 9)):
        own = [rng.randrange(256) for _ in range(rng.choice((1, 5, 17, 60, 300)))]
        params = SamplingParams(
            max_tokens=rng.choice((8, 60)), seed=i, logprobs=3, ignore_eos=True, n=1 + i % 2, **SHAPES[i % len(SHAPES)]
        )
        requests.append((shared[: rng.choice((0, 50, 100))] + own, params))
    # One that decodes over the border of two chunks of attention
    requests.append(([rng.randrange(256) for _ in range(500)], SamplingParams(max_tokens=30, seed=1, logprobs=3)))
    return requests


def _found(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    prompts, params = zip(*requests, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [[(sample.token_ids, sample.logprobs) for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("model", "quantization"),
    grid(
        [("", "auto"), ("", "int4"), ("", "fp8"), ("hybrid", "auto"), ("hybrid", "int4")],
        lambda case: case[1] == "auto",
    ),
)
def test_a_request_gives_the_same_bits_in_any_company(folder: Path, model: str, quantization: str) -> None:
    """With fp8, inputs are quantized too, each token by its own scale."""
    requests = _requests()
    if model:
        (folder / model).mkdir(exist_ok=True)
        folder = write_tiny_model(folder / model)
        (folder / "config.json").write_text(json.dumps(CONFIG | SIZES | HYBRID))
    programs: dict[str, Any] = {
        "model": str(folder),
        "quantization": quantization,
        "program_cache_dir": str(folder / quantization),
    }
    with LLM(
        **programs, **SETTINGS, cuda_graph_bs=[12], disable_radix_cache=True, disable_overlap_schedule=True
    ) as llm:
        assert llm._engine.info.deterministic
        assert llm._engine.info.quantization == ("none" if quantization == "auto" else quantization)
        alone = [_found(llm, [request])[0] for request in requests]
    crowd = {"chunked_prefill_size": 40, "cuda_graph_bs": [3, 12], "max_total_tokens": 576}
    with LLM(**programs, **SETTINGS, **crowd, schedule_conservativeness=0.0) as llm:
        together = _found(llm, requests)
        stats = llm._engine.engine.stats()
        assert stats.num_retractions > 0, stats
        llm.flush_cache()
        again = _found(llm, requests[::-1])[::-1]
        cached = _found(llm, requests[:6])
    assert together == alone
    assert again == alone
    assert cached == alone[:6]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "float32"}, "the products with layers.0.attention.qkv.* bfloat16 .the dtype is float32."),
        ({"attention_backend": "reference"}, "attention backend reference adds in an order"),
    ],
    ids=["float32", "reference"],
)
def test_what_does_not_hold_is_refused(folder: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(str(folder), **SETTINGS, **settings)
