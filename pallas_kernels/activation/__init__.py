"""The activation of gated feed-forward blocks."""

from pallas_kernels.activation.api import gated_silu

__all__ = ["gated_silu"]
