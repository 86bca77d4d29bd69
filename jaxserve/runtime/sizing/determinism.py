"""Whether a request gives the same bits in any company: whatever it is batched with, however its prompt is cut or
cached, preempted or not.

That holds where each row of every operation is computed in one order, whatever rows are beside it. Our CPU kernels
promise it, XLA's products and sums don't.
"""

from __future__ import annotations

from jaxserve.params import dotted
from jaxserve.quant import Packing
from pallas_kernels.paged_attention import Backend


def obstacle(platform: str, backend: Backend, packing: Packing, dtype: str) -> str:
    """What stands in the way, for an error or a log line; empty where nothing does."""
    if platform != "cpu":
        return (
            f"on a {platform} the order in which products and attention add depends on the size of the batch; "
            "only a CPU computes each row in one order so far"
        )
    if backend.name != "cpu":
        return f"attention backend {backend.name} adds in an order that depends on the batch; cpu does not"
    if packing.dense:
        names = ", ".join(dotted(path) for path in packing.dense[:3])
        more = f" and {len(packing.dense) - 3} more" if len(packing.dense) > 3 else ""
        return (
            f"the products with {names}{more} are XLA's, which add in an order that depends on the batch; weights that "
            f"our own kernel multiplies are bfloat16 (the dtype is {dtype}), not split by tp_size, and of sizes that "
            "are multiples of 16 outputs and 32 inputs"
        )
    return ""
