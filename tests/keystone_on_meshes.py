"""Run by test_mesh.py with eight CPU devices: serves the keystone's requests on each mesh shape, and prints a JSON line
for each.

The page pool is so small that requests are retracted, and host memory is a second cache tier; arrivals, aborts and
chunks are as in the keystone.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from jaxserve.api_types import FinishReason
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.worker import build_engine
from tests.drafts import draft_any_lengths
from tests.test_encoders import ENCODER, SIZES, check_crowd, random_texts
from tests.test_keystone import (
    DEEP,
    FULL,
    GROUPS,
    GROUPS_OF_EXPERTS,
    HEADED,
    HYBRID,
    LATENT,
    MIXTURE,
    WINDOWED,
    _check,
    _random_request,
    _run,
    assert_experts_are_counted,
    check_vector,
    naive_hidden,
    sampled_requests,
    with_pooled,
)
from tests.tiny_model import write_tiny_model

SETTINGS: dict[str, Any] = {
    "context_length": 64,
    "max_running_requests": 6,
    "cuda_graph_bs": (6,),
    "chunked_prefill_size": 16,
    "max_total_tokens": 72,
    "page_size": 4,
    "schedule_conservativeness": 0.1,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 4.0,
}


HYBRID_MIXTURE = HYBRID | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

MODELS = {
    "": FULL,
    "ngram": FULL,
    "draft": FULL,
    "deep": FULL | DEEP,
    "uneven": FULL | DEEP,
    "groups": GROUPS,
    "mixture": MIXTURE,
    "ragged": MIXTURE,
    "windows": WINDOWED,
    "groups-mixture": GROUPS_OF_EXPERTS,
    "groups-ragged": GROUPS_OF_EXPERTS,
    "latent": LATENT,
    "latent-ragged": LATENT,
    "latent-mtp": HEADED["mtp"],
    "latent-expanded": LATENT,
    "hybrid": HYBRID,
    "hybrid-ngram": HYBRID,
    "hybrid-mixture": HYBRID_MIXTURE,
    "hybrid-ragged": HYBRID_MIXTURE,
    "mean": FULL,
    "hybrid-last": HYBRID,
    "groups-vectors": GROUPS,
    "encoder": ENCODER,
}
RAGGED: dict[str, Any] = {"all2all_backend": "ragged_all_to_all", "enable_dp_attention": True}
TWO_POOLS: dict[str, Any] = {"swa_full_tokens_ratio": 0.5}
TIGHT: dict[str, Any] = {"max_total_tokens": 64, "schedule_conservativeness": 0.0}
"""For stages: requests take turns on them, so fewer grow at a time."""
FEW_ROWS: dict[str, Any] = {"max_running_requests": 2, "cuda_graph_bs": (2,)}
"""Each power of two of rows has its own program that makes drafts."""
MORE: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 3},
    "draft": {"speculative_method": "draft", "num_speculative_tokens": 3} | FEW_ROWS,
    "uneven": {"pp_layer_partition": "3,1"},
    "latent-mtp": {"speculative_method": "mtp", "num_speculative_tokens": 2} | FEW_ROWS,
    "groups": TWO_POOLS,
    "ragged": RAGGED,
    "groups-mixture": TWO_POOLS,
    "groups-ragged": TWO_POOLS | RAGGED,
    "latent-ragged": RAGGED,
    "latent-expanded": RAGGED | {"attention_backend": "reference"},
}
STATES = {"max_mamba_cache_size": 12, "max_total_tokens": 88}
MORE |= {
    "hybrid": STATES,
    "hybrid-ngram": MORE["ngram"] | STATES,
    "hybrid-mixture": STATES,
    "hybrid-ragged": RAGGED | STATES,
}
BOTH = {"runner": "generate", "convert": "embed"}
MORE["draft"] |= BOTH | {"pooling": "mean"}
MORE |= {
    "mean": BOTH | {"pooling": "mean"},
    "hybrid-last": STATES | BOTH,
    "groups-vectors": TWO_POOLS | {"runner": "pooling", "pooling": "mean"},
}
# Bits can be compared in bfloat16
MORE["encoder"] = SIZES | {
    "dtype": "bfloat16",
    "max_total_tokens": None,
    "enable_hierarchical_cache": False,
    "hicache_ratio": 2.0,
}
# With these, all that may happen does.
SEEDS = {"ngram": 3, "draft": 1, "mtp": 1}


def sizes_of(shape: str) -> tuple[int, int, int | None, int]:
    """Return the ranks, the shards, the parts of experts and the stages of a mesh shape."""
    found = re.match(r"(\d+)x(\d+)(?:e(\d+))?(?:p(\d+))?", shape)
    assert found is not None
    data, tensor, parts, stages = found.groups()
    return int(data), int(tensor), None if parts is None else int(parts), int(stages or 1)


def settings(model: str, shape: str, **more: Any) -> EngineConfig:
    """Return the configuration of a mesh shape: ranks x shards; then e with the parts into which experts are divided,
    and p with the pipeline stages."""
    data, tensor, parts, stages = sizes_of(shape)
    more |= {"ep_size": parts} if parts else {}
    more |= {"pp_size": stages} | (TIGHT if stages > 1 and "max_running_requests" not in more else {})
    if more.get("speculative_method") == "draft":
        more["speculative_model"] = model
    tensor *= data if more.get("enable_dp_attention") else 1
    common: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "disable_program_cache": True,
    }
    return EngineConfig(model=model, dp_size=data, tp_size=tensor, **common | SETTINGS | more)


def serve_on_mesh(
    config: EngineConfig, group: ProcessGroup | None = None, model: dict[str, Any] = FULL
) -> dict[str, Any]:
    """Serve all requests, compare greedy tokens with a naive recompute, and return the sampled ones with counters."""
    if model is ENCODER:
        return _serve_texts(config, group)
    if config.convert == "embed":
        naive_hidden([0], model)  # it compiles
    loop, info = build_engine(config, group)
    if config.speculative_method != "none":
        draft_any_lengths(loop, random.Random(SEEDS[config.speculative_method]))
    aborted = 0
    sequences: list[list[int]] = []
    # Each rank gets as many requests as a single device does; few find a prefix that has a state.
    for seed in range(config.dp_size * (3 if "linear_num_key_heads" in model else 1)):
        rng = random.Random(f"mesh {seed}")
        requests = []
        for i in range(24):
            requests.append(_random_request(rng, i, info.max_model_len, sequences[:5]))
            sequences.append(requests[-1].prompt_ids)
        if config.convert == "embed":
            requests = with_pooled(requests, rng)
        if config.runner == "pooling":
            requests = [request for request in requests if request.pooled]
        answers = _run(loop, requests, rng, abort_chance=0.1)
        for request in requests:
            if request.pooled:
                check_vector(request, answers[request.request_id], config.pooling.replace("auto", "last"), model)
            else:
                _check(request, answers[request.request_id], info.max_model_len, model)
            sequences.append(request.prompt_ids + answers[request.request_id].tokens)
        aborted += sum(answer.last.finish_reason is FinishReason.ABORT for answer in answers.values())
    stats = loop.stats(check=True)
    assert_experts_are_counted(stats, model)
    return {
        "tokens": {} if config.runner == "pooling" else _sampled_tokens(loop),
        "aborted": aborted,
        "preempted": stats.num_preemptions,
        "hits": stats.cache_hit_tokens,
        "loaded": stats.host_load_pages,
        "accepted": stats.accepted_tokens,
        "drafted": stats.draft_tokens,
        "compiles": stats.compiles_after_ready,
    }


def _serve_texts(config: EngineConfig, group: ProcessGroup | None) -> dict[str, Any]:
    """Serve whole texts, and compare each with itself alone."""
    loop, _ = build_engine(config, group)
    rng = random.Random("texts")
    check_crowd(loop, random_texts(rng, 60, ENCODER["vocab_size"]), rng, 0.0)
    return {"tokens": {}, "compiles": loop.stats().compiles_after_ready}


def write_model(folder: Path, model: dict[str, Any] = FULL) -> None:
    (write_tiny_model(folder) / "config.json").write_text(json.dumps(model))


def _sampled_tokens(loop: EngineLoop) -> dict[str, list[int]]:
    rng = random.Random(1)
    requests = sampled_requests(rng)
    return {name: answer.tokens for name, answer in _run(loop, requests, rng).items()}


def main(shapes: list[str]) -> None:
    assert len(jax.devices()) == 8, jax.devices()
    with tempfile.TemporaryDirectory() as name:
        for shape in shapes:
            mesh, _, kind = shape.partition("-")
            write_model(Path(name), MODELS[kind])
            served = serve_on_mesh(settings(name, mesh, **MORE.get(kind, {})), model=MODELS[kind])
            print(json.dumps({"shape": shape, **served}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
