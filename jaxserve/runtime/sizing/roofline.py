"""Computes the upper limits of speed on a device: the time to read memory or to multiply, whichever is longer.

Counts one read of the weights and the live KV per step, at full bandwidth, and the products at peak rate. Exchanges
between devices and everything else count as free. No program is faster than this.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxserve.runtime.devices.mesh import TENSOR_AXIS, device_bytes
from jaxserve.runtime.devices.target import DeviceTarget
from jaxserve.runtime.sizing.deployment import Deployment


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The limits of one data-parallel rank on `tensor` devices; all quantities are per device.

    `read_bytes` are those of the weights per step, `layer_flops` those of the layers' products per token, `head_flops`
    per sampled row, `attention_flops` per token and token that it attends to. `peak_flops` is None if it is unknown for
    the type.
    """

    bandwidth: float
    peak_flops: float | None
    read_bytes: int
    kv_per_token: int
    layer_flops: float
    head_flops: float
    attention_flops: float

    def decode_seconds(self, batch: int, context: int) -> float:
        """Return the shortest time of a step that decodes `batch` requests of `context` tokens each."""
        read = (self.read_bytes + batch * context * self.kv_per_token) / self.bandwidth
        flops = batch * (self.layer_flops + self.head_flops + context * self.attention_flops)
        return max(read, flops / self.peak_flops) if self.peak_flops is not None else read

    def prefill_tokens_per_second(self, length: int) -> float | None:
        """Return the most prompt tokens per second, for prompts of `length` tokens; None if the peak is unknown."""
        if self.peak_flops is None:
            return None
        return self.peak_flops / (self.layer_flops + length / 2 * self.attention_flops)


def roofline(deployment: Deployment, target: DeviceTarget) -> Roofline:
    """Return the limits of a deployment on a target."""
    model, params = deployment.model, deployment.params
    axes = {TENSOR_AXIS: deployment.tensor}
    whole = device_bytes(params, axes)
    head = params.embedding if params.output is None else params.output
    # A step reads only a few rows of the embedding, unless that is the output head as well.
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
