"""Generates results of `bench serve` from random requests, with vLLM's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def serve_result(
    seed: int, *, ttft: float = 0.1, itl: float = 0.02, requests: int = 200, tokens: int = 20, clients: int = 8,
    noise: float = 0.1, failed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return a result of `clients` clients that send one request after the other; times in seconds, with `noise`."""
    rng = np.random.default_rng(seed)
    ttfts = ttft * rng.lognormal(0.0, noise, requests)
    itls = itl * rng.lognormal(0.0, noise, (requests, tokens - 1))
    e2els = ttfts + itls.sum(axis=1)
    free = np.zeros(clients)
    starts = np.zeros(requests)
    for i in range(requests):
        client = int(free.argmin())
        starts[i] = free[client]
        free[client] += e2els[i]
    duration = float(free.max())
    result: dict[str, Any] = {
        "date": "20261121-150000", "backend": "openai", "label": None, "model_id": "tiny", "tokenizer_id": "tiny",
        "num_prompts": requests + failed, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": clients,
        "duration": duration, "completed": requests, "failed": failed,
        "total_input_tokens": 16 * requests, "total_output_tokens": tokens * requests,
        "request_throughput": requests / duration, "output_throughput": tokens * requests / duration,
        "total_token_throughput": (16 + tokens) * requests / duration,
        "input_lens": [16] * (requests + failed), "output_lens": [tokens] * requests + [0] * failed,
        "ttfts": [*map(float, ttfts), *[0.0] * failed], "itls": [*map(list, itls.tolist()), *[[]] * failed],
        "start_times": [*map(float, starts), *[0.0] * failed],
        "generated_texts": [""] * (requests + failed), "errors": [""] * requests + ["connection lost"] * failed,
    }  # fmt: skip
    by_name = {"ttft": ttfts, "tpot": itls.mean(axis=1), "itl": itls.ravel(), "e2el": e2els}
    for name, values in by_name.items():
        result[f"mean_{name}_ms"] = float(values.mean()) * 1e3
        result[f"median_{name}_ms"] = float(np.median(values)) * 1e3
        result[f"std_{name}_ms"] = float(values.std()) * 1e3
        result[f"p99_{name}_ms"] = float(np.quantile(values, 0.99)) * 1e3
    return result


def written(path: Path, content: object) -> str:
    """Write the content to a file and return its path."""
    path.write_text(json.dumps(content))
    return str(path)
