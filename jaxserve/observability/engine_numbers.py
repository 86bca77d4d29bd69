"""The numbers of an engine that have no labels: the names of their series, their texts and how each is read.

The names are vLLM's and SGLang's if they have one, both if they differ. `EngineFamilies` makes families of them.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.api_types import EngineInfo, EngineStats
from jaxserve.observability.acceptance import acceptance

GAUGES: tuple[tuple[tuple[str, ...], str, Callable[[EngineInfo, EngineStats], float]], ...] = (
    (
        ("num_requests_running", "num_running_reqs"),
        "Requests that hold a slot of the engine",
        lambda i, s: s.num_running,
    ),
    (("num_requests_waiting", "num_queue_reqs"), "Requests that wait for a slot", lambda i, s: s.num_waiting),
    (("num_queued_tokens",), "Tokens of prompts that wait to be computed", lambda i, s: s.num_queued_tokens),
    (
        ("token_usage", "kv_cache_usage_perc"),
        "Share of the KV cache in use, 0 to 1; cached pages that no request uses count as free",
        lambda i, s: s.token_usage,
    ),
    (
        ("full_token_usage",),
        "Share of the KV cache of whole sequences in use, 0 to 1",
        lambda i, s: s.full_token_usage,
    ),
    (
        ("swa_token_usage",),
        "Share of the KV cache of layers with a window in use, 0 to 1; 0 if there are none",
        lambda i, s: s.swa_token_usage,
    ),
    (
        ("num_used_tokens",),
        "Tokens of KV cache in use, counted in whole pages",
        lambda i, s: (s.num_pages - s.num_free_pages - s.num_evictable_pages) * i.page_size,
    ),
    (
        ("kv_available_tokens",),
        "Tokens of KV cache that are free and hold nothing cached",
        lambda i, s: s.num_free_pages * i.page_size,
    ),
    (
        ("num_evictable_tokens",),
        "Tokens of KV cache that are cached but unused; they are evicted when room is needed",
        lambda i, s: s.num_evictable_pages * i.page_size,
    ),
    (
        ("hicache_host_used_tokens",),
        "Tokens of cached KV that host memory holds",
        lambda i, s: s.num_host_pages_used * i.page_size,
    ),
    (
        ("hicache_host_total_tokens",),
        "Tokens of cached KV that host memory has room for",
        lambda i, s: s.num_host_pages * i.page_size,
    ),
    (("max_total_num_tokens",), "Tokens that the KV cache holds", lambda i, s: i.max_total_num_tokens),
    (("page_size",), "Tokens of a page of the KV cache", lambda i, s: i.page_size),
    (("num_pages",), "Pages of the KV cache", lambda i, s: i.num_pages),
    (("context_len",), "Most tokens of a prompt and its output", lambda i, s: i.max_model_len),
    (("max_running_requests",), "Requests that may run at once", lambda i, s: i.max_running_requests),
    (
        ("utilization",),
        "Share in use of what is scarcer, the slots for running requests or the KV cache, 0 to 1",
        lambda i, s: max(share(s.num_running, i.max_running_requests), s.token_usage),
    ),
    (
        ("available_gpu_mem_bytes",),
        "Memory of each device that was free once weights and KV cache were allocated",
        lambda i, s: i.free_bytes,
    ),
    (
        ("working_memory_bytes",),
        "Memory of each device that the programs take while they run: the compiler's figure plus a margin if memory "
        "limits the KV cache, else an estimate",
        lambda i, s: i.working_bytes,
    ),
    (
        ("kv_cache_memory_bound",),
        "1 if more memory would make the KV cache larger, else 0",
        lambda i, s: float(i.memory_bound),
    ),
    (
        ("new_token_ratio",),
        "Share of the running requests' remaining output that admission keeps room for",
        lambda i, s: s.new_token_ratio,
    ),
    (
        ("cache_hit_rate",),
        "Share of all prompt tokens so far that were found in the prefix cache, 0 to 1",
        lambda i, s: share(s.cache_hit_tokens, s.cache_query_tokens),
    ),
    (
        ("spec_accept_length",),
        "Tokens that a verified draft gave its request so far, on average, the model's own with them; 1 without "
        "speculative decoding",
        lambda i, s: acceptance(s).length,
    ),
    (
        ("spec_accept_rate",),
        "Share of the verified draft tokens that were accepted so far, 0 to 1",
        lambda i, s: acceptance(s).rate,
    ),
)
COUNTERS: tuple[tuple[tuple[str, ...], str, Callable[[EngineInfo, EngineStats], int]], ...] = (
    (("prompt_tokens",), "Prompt tokens processed, cached ones included", lambda i, s: s.prompt_tokens),
    (("generation_tokens",), "Tokens generated", lambda i, s: s.generation_tokens),
    (
        ("prefix_cache_queries",),
        "Prompt tokens looked up in the prefix cache, once per request",
        lambda i, s: s.cache_query_tokens,
    ),
    (
        ("prefix_cache_hits", "cached_tokens"),
        "Prompt tokens found in the prefix cache; tokens computed again after a retraction never count",
        lambda i, s: s.cache_hit_tokens,
    ),
    (
        ("num_preemptions",),
        "Running requests sent back to the queue, for lack of KV cache or for a higher priority",
        lambda i, s: s.num_preemptions,
    ),
    (
        ("num_retracted_reqs",),
        "Running requests sent back to the queue for lack of KV cache",
        lambda i, s: s.num_retractions,
    ),
    (
        ("hicache_saved_tokens",),
        "Tokens of cached KV copied to host memory",
        lambda i, s: s.host_save_pages * i.page_size,
    ),
    (
        ("hicache_loaded_tokens",),
        "Tokens of cached KV copied back from host memory",
        lambda i, s: s.host_load_pages * i.page_size,
    ),
    (("spec_decode_num_drafts",), "Drafts that were verified, one per request and step", lambda i, s: s.num_drafts),
    (("spec_decode_num_draft_tokens",), "Draft tokens that were verified", lambda i, s: s.draft_tokens),
    (("forced_tokens",), "Generation tokens that were forced, not drawn", lambda i, s: s.forced_tokens),
    (("spec_decode_num_accepted_tokens",), "Draft tokens that were accepted", lambda i, s: s.accepted_tokens),
    (("engine_steps",), "Steps that the engine has finished", lambda i, s: s.num_steps),
    (
        ("compiles_after_ready",),
        "Programs compiled since the server was ready; anything but 0 is a bug",
        lambda i, s: s.compiles_after_ready,
    ),
)


def share(part: float, whole: float) -> float:
    """Return a part as a share of the whole, 0 of nothing."""
    return part / whole if whole else 0.0
