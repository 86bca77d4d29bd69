"""The ranges of settings that are numbers."""

from __future__ import annotations

import sys

import msgspec

from jaxserve.config.processes import ALL_DEVICES
from jaxserve.errors import ConfigError

# Limits that no machine reaches, or that a 32-bit index can't exceed; the real limits are known at start-up.
MOST = 2**31 - 1
_MOST_BYTES = 2**62
_MOST_SECONDS = 1e8
_ABOVE_0 = sys.float_info.min
_MOST_DEVICES = 2**16

Ranges = dict[str, tuple[float, float]]
ENGINE_RANGES: Ranges = {
    "random_seed": (-(2**63), 2**63 - 1),
    "tp_size": (1, _MOST_DEVICES),
    "dp_size": (1, _MOST_DEVICES),
    "pp_size": (1, _MOST_DEVICES),
    "ep_size": (ALL_DEVICES, _MOST_DEVICES),
    "nnodes": (1, _MOST_DEVICES),
    "dist_timeout": (0.1, _MOST_SECONDS),
    "context_length": (1, MOST),
    "page_size": (1, 2**16),
    "max_total_tokens": (1, _MOST_BYTES),
    "kv_cache_memory_bytes": (1, _MOST_BYTES),
    "num_gpu_blocks_override": (1, MOST),
    "default_priority_value": (-(2**31), MOST),
    "priority_scheduling_preemption_threshold": (0, MOST),
    "prefill_max_requests": (1, MOST),
    "swa_full_tokens_ratio": (_ABOVE_0, 1.0),
    "max_running_requests": (1, MOST),
    "max_mamba_cache_size": (1, MOST),
    "state_snapshot_interval": (0, MOST),
    "max_queued_requests": (0, MOST),
    "max_num_queued_reqs": (0, MOST),
    "max_num_queued_tokens": (0, MOST),
    "chunked_prefill_size": (-1, MOST),
    "base_gpu_id": (0, _MOST_DEVICES),
    "gpu_id_step": (1, _MOST_DEVICES),
    "long_prefill_token_threshold": (0, MOST),
    "soft_watchdog_timeout": (_ABOVE_0, _MOST_SECONDS),
    "max_prefill_tokens": (1, MOST),
    "max_num_batched_tokens": (1, MOST),
    "max_mixed_step_ms": (0, MOST),
    "pooled_time_share": (_ABOVE_0, 1.0),
    "cuda_graph_max_bs": (1, MOST),
    "schedule_conservativeness": (0.0, 1e6),
    "hicache_ratio": (_ABOVE_0, 1e6),
    "hicache_size": (_ABOVE_0, 1e6),
    "hicache_host_memory_fraction": (_ABOVE_0, 1.0),
    "num_speculative_tokens": (1, 16),
    "speculative_disable_by_batch_size": (1, MOST),
    "prompt_lookup_max": (1, 8),
    "prompt_lookup_min": (1, 8),
    "watchdog_timeout": (0.1, _MOST_SECONDS),
    "decode_log_interval": (1, MOST),
}
SERVER_RANGES: Ranges = {
    "api_server_count": (1, 256),
    "ssl_cert_reqs": (0, 2),
    "log_requests_level": (0, 3),
    "max_log_len": (0, MOST),
    "max_logprobs": (0, 20),
    "stream_interval": (1, MOST),
    "sse_keep_alive_interval": (0.0, _MOST_SECONDS),
    "default_thinking_budget": (-1, MOST),
    "max_stored_responses": (0, MOST),
    "max_stored_response_bytes": (0, _MOST_BYTES),
    "stored_response_seconds": (0, MOST),
    "max_body_bytes": (1, _MOST_BYTES),
    "max_header_bytes": (1, _MOST_BYTES),
    "request_read_timeout": (_ABOVE_0, _MOST_SECONDS),
    "keep_alive_timeout": (_ABOVE_0, _MOST_SECONDS),
    "drain_timeout": (0.0, _MOST_SECONDS),
}


def check_ranges(config: msgspec.Struct, ranges: Ranges) -> None:
    """Raise `ConfigError` if a field is out of its range; None is in every one."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:  # written so that NaN is refused too
            least = "more than 0" if low == _ABOVE_0 else f"at least {low}"
            limit = f"at most {high}" if value > high else least
            raise ConfigError(f"{name} must be {limit}, got {value}")
