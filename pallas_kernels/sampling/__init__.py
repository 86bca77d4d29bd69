"""Draws tokens from truncated distributions."""

from pallas_kernels.sampling.api import draw_tokens
from pallas_kernels.sampling.noise import exponential_noise

__all__ = ["draw_tokens", "exponential_noise"]
