"""Builders that the tests of the engine share."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.step_plan import Capacity


def make_request(
    request_id: str,
    prompt: int | Sequence[int] = 4,
    *,
    stop_ids: tuple[int, ...] = (),
    client: int = 0,
    priority: int | None = 0,
    namespace: str = "",
    group_id: str = "",
    sample: int = 0,
    **sampling: Any,
) -> EngineRequest:
    """Make a greedy request; `prompt` is its tokens, or the number of tokens that no other request shares."""
    if isinstance(prompt, int):
        prompt = [zlib.crc32(f"{request_id} {i}".encode()) % 50 for i in range(prompt)]
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return EngineRequest(
        request_id=request_id,
        prompt_ids=list(prompt),
        stop_ids=stop_ids,
        client=client,
        sampling=params,
        priority=priority,
        namespace=namespace,
        group_id=group_id,
        sample=sample,
    )


def make_capacity(**changes: Any) -> Capacity:
    """Make a capacity, by default for 4 requests of up to 64 tokens."""
    sizes: dict[str, Any] = {
        "num_slots": 4,
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 64,
        "decode_buckets": (1, 2, 4),
        "token_buckets": (16, 64),
        "prompt_logprob_tokens": 8,
    }
    return Capacity(**{**sizes, **changes})
