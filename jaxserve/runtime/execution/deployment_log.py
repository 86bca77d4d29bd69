"""Logs at start-up what was chosen for a deployment: its weights, its KV groups, the scales of its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jaxserve.api_types import KVGroup
from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.sizing.state_pool import delta_backend
from jaxserve.weights.kv_scales import KVScales
from pallas_kernels.paged_attention import largest_float8

logger = logging.getLogger("jaxserve.runtime")


_POOLED = {
    "last": "the last token",
    "mean": "the mean of all tokens",
    "cls": "the first token",
    "all": "each token by itself",
}


def log_sizes(deployment: Deployment, free: int) -> None:
    """Log how much a step and the KV cache hold, and the `free` bytes of a device."""
    capacity, sizes, ranks = deployment.capacity, deployment.sizes, deployment.data
    cache = "" if capacity.encodes else f"max_total_num_tokens={ranks * capacity.num_pages * capacity.page_size}, "
    logger.info(
        "%schunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, context_len=%d, "
        "available_gpu_mem=%.2f GB%s",
        cache,
        sizes.chunked_prefill_size,
        sizes.max_prefill_tokens,
        ranks * capacity.num_slots,
        capacity.max_model_len,
        free / 2**30,
        "; texts are read in both directions, without a KV cache" if capacity.encodes else "",
    )


def log_kv_groups(groups: Sequence[KVGroup], page_size: int) -> None:
    """Log the layers and the tokens of each KV group, if there are several."""
    if len(groups) < 2:
        return
    found = []
    for group in groups:
        layers = f"{group.num_layers} layer{'' if group.num_layers == 1 else 's'}"
        kind = "full" if group.window is None else f"with a window of {group.window}"
        found.append(f"{layers} {kind}, {group.num_pages * page_size} tokens")
    logger.info("KV groups: %s", "; ".join(found))


def log_states(deployment: Deployment) -> None:
    """Log the states that the model keeps of sequences, and the kernel that computes them, if it keeps any."""
    backend, sizes = delta_backend(deployment.model, deployment.dtype, deployment.device.kernels), deployment.sizes
    if backend is None:
        return
    logger.info(
        "states of sequences: %d of %.2f MiB on each device, for %d requests and for prefixes of whole multiples of %d "
        "tokens; "
        "gated delta nets: %s (%s)",
        deployment.data * sizes.capacity.num_states,
        sizes.state_bytes / 2**20,
        deployment.data * sizes.capacity.num_slots,
        sizes.capacity.state_unit,
        backend.name,
        backend.reason,
    )


def log_pooling(deployment: Deployment) -> None:
    """Log what vectors are made of, if any are."""
    pooling = deployment.model.config.pooling
    if pooling is None:
        return
    layers = "".join(f", then {layer.name} [{layer.outputs}, {layer.inputs}]" for layer in pooling.layers)
    alone = "" if deployment.model.config.generates else "; no tokens are generated"
    logger.info(
        "pooled requests: %s%s, %d numbers%s", _POOLED[pooling.method], layers, deployment.capacity.pooled_size, alone
    )


def log_drafting(deployment: Deployment) -> None:
    """Log how drafts are made, if there are any."""
    drafting, config = deployment.drafting, deployment.config
    if drafting is None:
        return
    by = ""
    if drafting.model is not None:
        size = device_bytes(drafting.params, deployment.axis_sizes) / 2**20
        name = config.speculative_model or "the model's own layer"
        layers = f"{drafting.model.config.num_layers} layer{'' if drafting.model.config.num_layers == 1 else 's'}"
        by = f" by {name} ({layers}, {size:.1f} MiB of weights)"
    most = drafting.drafter.max_drafts
    logger.info("speculative decoding: %s%s, at most %d draft tokens a step", config.speculative_method, by, most)


def log_weights(deployment: Deployment) -> None:
    """Log how weights are quantized, which are not, and why."""
    weights = deployment.weights
    if weights.summary:
        logger.info(
            "weights: %s; %s; %.1f MiB in all, %.1f in %s",
            weights.summary,
            f"not quantized: {weights.reasons}" if weights.others else "all are quantized",
            deployment.sizes.footprint.weights / 2**20,
            deployment.dense_bytes / 2**20,
            deployment.dtype.name,
        )


def log_kv_scales(deployment: Deployment, scales: Sequence[KVScales | None]) -> None:
    """Log where the scales of an fp8 KV cache come from; `scales` are those of each pipeline stage."""
    dtype = deployment.state.kv[0].keys.dtype
    if deployment.config.calculate_kv_scales:
        origin = "will be calculated from the first prompts"
    elif not any(scales):
        origin = (
            f"are 1, as the checkpoint has none: values beyond {largest_float8(dtype):g} are clipped; "
            "--calculate-kv-scales takes them from the first prompts"
        )
    else:
        counted, layers = (
            sum(one.num_layers for one in scales if one),
            sum(one.num_layers for one in deployment.kv_specs),
        )
        origin = f"come from the checkpoint, for {counted} of {layers} layers"
    logger.info("KV cache: %s; its scales %s", dtype.name, origin)
