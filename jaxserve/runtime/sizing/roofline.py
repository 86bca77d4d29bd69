"""Computes the upper limits of speed on a device: the time to read memory or to multiply, whichever is longer.

Counts one read of the weights and the live KV per step, at full bandwidth, and the products at peak rate. Exchanges
between devices and everything else count as free. No program is faster than this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxserve.layers.latent_attention import expands
from jaxserve.models.config import LatentSizes
from jaxserve.params import ParamSpec
from jaxserve.runtime.devices.mesh import device_bytes
from jaxserve.runtime.devices.target import DeviceTarget
from jaxserve.runtime.sizing.deployment import Deployment
from pallas_kernels.gated_delta import BLOCK
from pallas_kernels.quantized_matmul import HeldWeight, QuantizedWeight


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """The cost of the attention of layers with the same window: bytes to read and flops, per token attended to.

    The first `start` tokens of a prompt are computed in another form, with `start_flops`. A `bidirectional` one also
    attends to later tokens, with a window on each side.
    """

    window: int | None
    nbytes: float
    flops: float
    start: int = 0
    start_flops: float = 0.0
    bidirectional: bool = False

    def attended(self, context: int) -> int:
        """Return the number of tokens that the last token of a sequence attends to."""
        return context if self.window is None else min(context, self.window)

    def prompt_attended(self, length: int) -> float:
        """Return the sum of the numbers of tokens that each token of a prompt attends to."""
        seen = self.attended(length)
        if self.bidirectional:
            return length * min(length, 2 * seen + 1)
        return seen * (length - seen / 2)

    def prompt_flops(self, length: int) -> float:
        """Return the flops of a prompt of `length` tokens."""
        first = self.prompt_attended(min(length, self.start))
        return self.flops * (self.prompt_attended(length) - first) + self.start_flops * first


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The limits of one data-parallel rank on `tensor` devices; all quantities are per device.

    `read_bytes` are those of the weights per step, without experts; `layer_flops` are those of the layers' products per
    token, `head_flops` per sampled row: products of inputs in 8 bits count for less, as they are faster. `attention` is
    the cost of the layers by window. `peak_flops` is None if it is unknown for the type.

    All experts take `expert_bytes`. Each token chooses a `chosen_share` of them, evenly, and a step reads the experts
    that tokens of any of `expert_ranks` ranks chose. A program has a row for each token and each of
    its experts; `idle_row_bytes` are the bytes of the rows of a token whose experts other devices have.

    The decode of a request also moves `state_bytes` of its state. No prompt is longer than `longest`: more tokens are
    those of several.
    """

    bandwidth: float
    peak_flops: float | None
    read_bytes: int
    layer_flops: float
    head_flops: float
    attention: tuple[AttentionCost, ...]
    expert_bytes: int = 0
    chosen_share: float = 0.0
    expert_ranks: int = 1
    idle_row_bytes: float = 0.0
    state_bytes: float = 0.0
    longest: int = 2**31 - 1

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step with `tokens` tokens on each rank reads."""
        return self.read_bytes + self.expert_bytes - self.unread_bytes(tokens)

    def unread_bytes(self, tokens: int) -> float:
        """Return the bytes of the experts that no token of a step with `tokens` tokens on each rank chooses."""
        return self.expert_bytes * (1 - self.chosen_share) ** (tokens * self.expert_ranks)

    def kv_bytes(self, context: int) -> float:
        """Return the bytes of keys, values and states that the decode of a request of `context` tokens moves."""
        return sum(one.nbytes * one.attended(context) for one in self.attention) + self.state_bytes

    def decode_flops(self, context: int) -> float:
        """Return the flops of the attention when a request of `context` tokens decodes."""
        return sum(one.flops * one.attended(context) for one in self.attention)

    def prompt_flops(self, length: int) -> float:
        """Return the flops of the attention of a prompt of `length` tokens."""
        most = min(length, self.longest)
        return sum(one.prompt_flops(most) for one in self.attention) * length / most if length else 0.0

    def decode_seconds(self, batch: int, context: int) -> float:
        """Return the shortest time of a step that decodes `batch` requests of `context` tokens each."""
        read = (self.weight_bytes(batch) + batch * self.kv_bytes(context)) / self.bandwidth
        flops = batch * (self.layer_flops + self.head_flops + self.decode_flops(context))
        return max(read, flops / self.peak_flops) if self.peak_flops is not None else read

    def prefill_tokens_per_second(self, length: int) -> float | None:
        """Return the most prompt tokens per second, for prompts of `length` tokens; None if the peak is unknown."""
        if self.peak_flops is None:
            return None
        return self.peak_flops / (self.layer_flops + self.prompt_flops(length) / length)


@dataclasses.dataclass(frozen=True)
class PipelineRoofline:
    """The limits of a data-parallel rank whose layers are divided among `stages`, or are all in one.

    A decode step of a batch is as many steps as there are stages, or requests if these are fewer: each of them computes
    a part of the batch in one stage after the other.
    """

    stages: tuple[Roofline, ...]

    def step_seconds(self, batch: int, context: int) -> float:
        """Return the shortest time of a part of a batch from the start of the first stage to the end of the last."""
        return sum(self._seconds_by_stage(batch, context))

    def decode_seconds(self, batch: int, context: int) -> float:
        """Return the shortest time in which each of `batch` requests of `context` tokens gets a token."""
        seconds = self._seconds_by_stage(batch, context)
        return max(sum(seconds), min(batch, len(seconds)) * max(seconds))

    def prefill_tokens_per_second(self, length: int) -> float | None:
        """Return the most prompt tokens per second, for prompts of `length` tokens; None if the peak is unknown."""
        limits = [stage.prefill_tokens_per_second(length) for stage in self.stages]
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    def _seconds_by_stage(self, batch: int, context: int) -> list[float]:
        rows = -(-batch // len(self.stages))
        return [stage.decode_seconds(rows, context) for stage in self.stages]


def pipeline_roofline(deployment: Deployment, target: DeviceTarget) -> PipelineRoofline:
    """Return the limits of all stages of a deployment on a target."""
    return PipelineRoofline(tuple(roofline(part, target) for part in deployment.parts))


def roofline(deployment: Deployment, target: DeviceTarget) -> Roofline:
    """Return the limits of a deployment, or of one of its stages, on a target."""
    params = deployment.params
    axes = deployment.axis_sizes
    model, ranks = deployment.model.config, deployment.data if deployment.divided.over_ranks else 1
    head = params.head if deployment.model.draws else None
    experts = [leaf for leaf in _leaves(params.layers) if _is_of_experts(leaf)]
    others = [leaf for leaf in _leaves(params.layers) if not _is_of_experts(leaf)]
    of_layers = functools.partial(_elements, axes=axes, dtype=deployment.dtype, target=target)
    chosen = model.experts_per_token / (model.num_experts or 1)
    return Roofline(
        bandwidth=target.memory_bandwidth,
        peak_flops=target.peak_flops.get(deployment.dtype.name),
        # A step reads only a few rows of an embedding that isn't the output head as well.
        read_bytes=device_bytes((others, params.norm, params.pooled, head), axes),
        layer_flops=2 * (of_layers(others) + of_layers(experts) * chosen * ranks) + _state_flops(deployment),
        head_flops=2 * of_layers(head),
        attention=_attention(deployment),
        expert_bytes=device_bytes(experts, axes),
        chosen_share=chosen,
        expert_ranks=ranks,
        idle_row_bytes=_idle_row_bytes(deployment, experts),
        # It is read for each token, and written once for a block of them.
        state_bytes=deployment.sizes.state_bytes * (1 + 1 / BLOCK),
        longest=deployment.capacity.max_model_len,
    )


def _state_flops(deployment: Deployment) -> float:
    """Return the flops of a token with the states of all layers: two products with each, and an outer product."""
    spec = deployment.model.state_spec()
    if spec is None:
        return 0.0
    return 6 * spec.num_layers * spec.value_heads * spec.key_dim * spec.value_dim / deployment.tensor


def _idle_row_bytes(deployment: Deployment, experts: list[ParamSpec | HeldWeight]) -> float:
    """Return the bytes, for each token, of inner rows and outputs of experts that other devices have.

    Both are written once and read once, in 16 bits; inner rows are also quantized, if products want that.
    """
    model, divided = deployment.model.config, deployment.divided
    ranks = deployment.data if divided.over_ranks else 1
    quantizes = any(isinstance(leaf, QuantizedWeight) and leaf.scheme.activations is not None for leaf in experts)
    row = model.expert_size * (6 if quantizes else 4) + model.hidden_size * 4
    pairs = ranks * model.experts_per_token * len(deployment.model.mixture_layers)
    return pairs * (1 - 1 / divided.expert_parts) * row


def _attention(deployment: Deployment) -> tuple[AttentionCost, ...]:
    """Return the cost of the layers by window. Layers that share keys and values each read them."""
    model, tensor = deployment.model, deployment.tensor
    config, kv_per_token = model.config, deployment.sizes.footprint.kv_per_token
    if config.latent is not None:
        return (_latent_attention(config.latent, deployment),)
    groups = zip(deployment.kv_specs, kv_per_token, strict=True)
    layer_bytes = {
        (spec.num_kv_heads, spec.head_dim): size / spec.num_layers for spec, size in groups if spec.num_layers
    }
    attending = (i for i in model.layers if i not in config.delta_layers)
    layers = Counter((config.windows[i], model.kv_shape(i)) for i in attending)
    return tuple(
        AttentionCost(
            window,
            count * layer_bytes.get(shape, 0.0),
            count * 4 * config.num_heads * shape[1] / tensor,
            bidirectional=config.bidirectional,
        )
        for (window, shape), count in layers.items()
    )


def _latent_attention(latent: LatentSizes, deployment: Deployment) -> AttentionCost:
    """Return the cost of latent attention: in the absorbed form, but for the first chunk of a prompt."""
    config, [nbytes] = deployment.model.config, deployment.sizes.footprint.kv_per_token
    chunk, expanded = deployment.sizes.chunked_prefill_size, latent.qk_nope_head_dim + latent.v_head_dim
    start = chunk if expands(deployment.backend, chunk, latent.kv_lora_rank, expanded) else 0
    flops, start_flops = (
        2 * len(deployment.model.layers) * config.num_heads / deployment.tensor * products
        for products in (latent.row + latent.kv_lora_rank, latent.query + latent.v_head_dim)
    )
    return AttentionCost(None, nbytes, flops, start, start_flops)


def _elements(specs: Any, axes: dict[str, int], dtype: np.dtype, target: DeviceTarget) -> float:
    """Return the elements of a tree of weights. An element that is multiplied twice as fast counts half."""
    return sum(_elements_of(leaf, axes, dtype, target) for leaf in _leaves(specs))


def _leaves(specs: Any) -> list[ParamSpec | HeldWeight]:
    leaves: list[ParamSpec | HeldWeight] = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, HeldWeight))
    return leaves


def _is_of_experts(leaf: ParamSpec | HeldWeight) -> bool:
    if isinstance(leaf, ParamSpec):
        return leaf.num_experts > 0
    spec: ParamSpec = leaf.numbers if isinstance(leaf, QuantizedWeight) else leaf.data
    return spec.num_experts > 0


def _elements_of(leaf: ParamSpec | HeldWeight, axes: dict[str, int], dtype: np.dtype, target: DeviceTarget) -> float:
    if not isinstance(leaf, QuantizedWeight):
        return device_bytes(leaf, axes) / dtype.itemsize
    elements = device_bytes(leaf.numbers, axes) * 8 / leaf.scheme.bits
    usual = target.peak_flops.get(dtype.name)
    rate = target.peak_flops.get({"fp8": "float8"}.get(leaf.scheme.numbers, leaf.scheme.numbers))
    return elements if leaf.scheme.activations is None or not usual or not rate else elements * usual / rate
