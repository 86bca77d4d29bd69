"""Draws tokens from truncated distributions, edits logits, and finds the largest ones."""

from pallas_kernels.sampling.api import RowKernels, draw_tokens, row_kernels
from pallas_kernels.sampling.noise import exponential_noise
from pallas_kernels.sampling.parameters import (
    COUNT_MASK,
    SEEN_IN_PROMPT,
    DrawParameters,
    Edits,
    FloatColumn,
    IntColumn,
    SlotTable,
)

__all__ = [
    "COUNT_MASK",
    "SEEN_IN_PROMPT",
    "DrawParameters",
    "Edits",
    "FloatColumn",
    "IntColumn",
    "RowKernels",
    "SlotTable",
    "draw_tokens",
    "exponential_noise",
    "row_kernels",
]
