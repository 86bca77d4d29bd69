"""Draws from truncated distributions."""

from pallas_kernels.sampling.cpu import draw_tokens
from pallas_kernels.sampling.noise import waits

__all__ = ["draw_tokens", "waits"]
