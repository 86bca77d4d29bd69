"""What a device could do at best: bytes it must read over its bandwidth, products over its peak, whichever is longer.

Weights and live KV are read once a step; what devices exchange, and everything else, is taken as free. No program is
faster than this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxserve.runtime.devices.mesh import TENSOR_AXIS, device_bytes
from jaxserve.runtime.devices.target import Target
from jaxserve.runtime.sizing.deployment import Deployment


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The limits of one data-parallel rank, on `tensor` devices of a kind; all quantities are of one device.

    `read_bytes` of weights a step; `layer_flops` a token, of the layers' products; `head_flops` a sampled row;
    `attention_flops` a token for each token it sees. `peak_flops` is None where the type has no figure.
    """

    bandwidth: float
    peak_flops: float | None
    read_bytes: int
    kv_per_token: int
    layer_flops: float
    head_flops: float
    attention_flops: float

    def decode_seconds(self, batch: int, context: int) -> float:
        """The shortest step that decodes `batch` requests of `context` tokens each."""
        read = (self.read_bytes + batch * context * self.kv_per_token) / self.bandwidth
        flops = batch * (self.layer_flops + self.head_flops + context * self.attention_flops)
        return max(read, flops / self.peak_flops) if self.peak_flops is not None else read

    def prefill_tokens_per_second(self, length: int) -> float | None:
        """The most prompt tokens a second, for prompts of `length` tokens; None where the peak isn't known."""
        if self.peak_flops is None:
            return None
        return self.peak_flops / (self.layer_flops + length / 2 * self.attention_flops)


def roofline(deployment: Deployment, target: Target) -> Roofline:
    """The limits of a deployment on a target."""
    model, params = deployment.model, deployment.params
    axes = {TENSOR_AXIS: deployment.tensor}
    whole = device_bytes(params, axes)
    head = params.embedding if params.output is None else params.output
    # A step looks up a few rows of the embedding; it reads it whole only where it is the head as well.
    looked_up = 0 if params.output is None else device_bytes(params.embedding, axes)
    return Roofline(
        bandwidth=target.memory_bandwidth,
        peak_flops=target.peak_flops.get(deployment.dtype.name),
        read_bytes=whole - looked_up,
        kv_per_token=deployment.sizes.footprint.kv_per_token,
        layer_flops=2 * _elements(params.layers, axes, deployment.dtype),
        head_flops=2 * _elements(head, axes, deployment.dtype),
        attention_flops=4 * model.num_heads * model.head_dim * model.num_layers / deployment.tensor,
    )


def _elements(specs: Any, axes: dict[str, int], dtype: np.dtype) -> float:
    return device_bytes(specs, axes) / dtype.itemsize
