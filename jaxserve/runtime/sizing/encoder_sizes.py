"""Resolves the sizes of a bidirectional model's deployment: its programs need no cache, and leave no state."""

from __future__ import annotations

from jaxserve.config.data_parallel import Parallelism
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.layout import AnyModel
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.sizing.memory import Footprint, InsufficientMemoryError, usable_bytes
from jaxserve.runtime.sizing.sizes import Sizes, activation_bytes
from jaxserve.runtime.step.buckets import token_buckets
from jaxserve.step_plan import Capacity

_TEXTS = 256
_TOKENS_ON_CPU, _TOKENS = 512, 8192
_SMALLEST_ON_CPU, _SMALLEST = 16, 256

# Settings of a KV cache, with the values at which they ask for nothing
_WITHOUT_MEANING = {
    "kv_cache_dtype": "auto",
    "calculate_kv_scales": False,
    "long_prefill_token_threshold": 0,
    "max_total_tokens": None,
    "kv_cache_memory_bytes": None,
    "num_gpu_blocks_override": None,
    "retraction_policy": "length",
    "radix_eviction_policy": "lru",
    "swa_full_tokens_ratio": None,
    "disable_hybrid_swa_memory": False,
    "enable_hierarchical_cache": False,
    "kv_events_config": None,
    "max_mamba_cache_size": None,
}


def encoder_sizes(
    config: EngineConfig,
    model: AnyModel,
    device: DeviceFacts,
    divided: Parallelism,
    *,
    weight_bytes: int,
    activations: int | None,
) -> Sizes:
    """Return the sizes of a bidirectional model. A step has `chunked_prefill_size` tokens, or one longer text.

    `activations` is the working memory of the programs in bytes, if it is known. Raises `ConfigError` for settings that
    don't apply or sizes that don't fit.
    """
    for name, nothing in _WITHOUT_MEANING.items():
        if (value := getattr(config, name)) != nothing:
            raise ConfigError(
                f"{name}={value}: this model reads whole texts in both directions, and has no KV cache; leave it out"
            )
    on_cpu, longest = device.platform == "cpu", model.config.longest_context
    context = config.context_length or longest
    if context > longest:
        raise ConfigError(
            f"context_length={context} is longer than the model's {longest} tokens; lower --context-length"
        )
    tokens = config.max_num_batched_tokens or config.chunked_prefill_size or (_TOKENS_ON_CPU if on_cpu else _TOKENS)
    tokens = context if tokens < 0 else tokens
    tokens = min(tokens, config.max_prefill_tokens or tokens)
    texts = config.max_running_requests or min(_TEXTS, tokens)
    largest = max(tokens, context)
    footprint = Footprint(
        weights=weight_bytes,
        state=0,
        activations=activations or activation_bytes(model, device.platform, largest, texts, divided),
        kv_per_token=(),
    )
    usable = usable_bytes(config, device.memory_bytes)
    if footprint.non_pool > usable:
        raise InsufficientMemoryError(
            f"{footprint.weights / 2**30:.2f} GiB of weights and {footprint.activations / 2**30:.2f} GiB of "
            f"activations don't fit a device of which {usable / 2**30:.2f} GiB may be used"
        )
    pooling = model.config.pooling
    assert pooling is not None
    capacity = Capacity(
        num_slots=texts,
        num_pages=0,
        page_size=config.page_size,
        max_model_len=context,
        decode_buckets=(),
        token_buckets=token_buckets(largest, smallest=_SMALLEST_ON_CPU if on_cpu else _SMALLEST),
        prompt_logprob_tokens=0,
        num_ranks=divided.data,
        vocab_size=model.padded_vocab_size,
        pooled_size=pooling.size(model.config.hidden_size),
        pools_all_tokens=True,
        pools_by_token=pooling.method == "all",
        generates=False,
        encodes=True,
    )
    return Sizes(capacity, tokens, tokens, tokens, 0, footprint, context, memory_bound=False)
