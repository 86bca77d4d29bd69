"""Draws tokens from truncated distributions, edits logits, and finds the largest ones."""

from pallas_kernels.sampling.api import RowKernels, draw_tokens, row_kernels
from pallas_kernels.sampling.noise import exponential_noise

__all__ = ["RowKernels", "draw_tokens", "exponential_noise", "row_kernels"]
