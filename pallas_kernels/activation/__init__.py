"""The activations of feed-forward blocks."""

from pallas_kernels.activation.api import gated_silu, gelu

__all__ = ["gated_silu", "gelu"]
