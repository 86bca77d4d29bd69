"""Decides whether a request gives the same bits in any batch, however its prompt is chunked, cached or preempted.

It does if every operation computes each row in the same order, whatever the other rows of the batch are. Our CPU
kernels guarantee that, XLA's products and sums don't.
"""

from __future__ import annotations

from jaxserve.error_texts import join_first
from jaxserve.params import dotted
from jaxserve.quant import WeightChoice
from pallas_kernels.paged_attention import Backend


def why_nondeterministic(
    platform: str, backend: Backend, delta: Backend | None, weights: WeightChoice, dtype: str, tensor: int
) -> str:
    """Return why the bits of a request depend on its batch, for an error or a log line; empty if they don't.

    `delta` computes gated delta nets, if there are any.
    """
    if platform != "cpu":
        return (
            f"on a {platform} the order of additions in products and attention depends on the size of the batch; "
            "so far only a CPU computes each row in a fixed order"
        )
    if backend.name != "cpu":
        return f"attention backend {backend.name} adds in an order that depends on the batch; backend cpu does not"
    if delta is not None and delta.name != "cpu":
        return f"gated delta nets are computed by {delta.name}, which adds in an order that depends on the batch"
    if tensor > 1:
        return f"with tp_size={tensor} XLA adds the sums of shards, in an order that depends on the batch"
    if weights.dense:
        names = join_first([dotted(path) for path in weights.dense], 3)
        return (
            f"XLA computes the products with {names}, and adds in an order that depends on the batch; our own "
            f"kernel multiplies only weights that are bfloat16 (the dtype is {dtype}) or quantized, in "
            "multiples of 16 outputs and 32 inputs"
        )
    return ""
