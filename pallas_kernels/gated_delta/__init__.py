"""Gated delta nets over ragged rows of tokens: `gated_delta`, and the layout of the states that it updates."""

from pallas_kernels.gated_delta.api import gated_delta
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.backends import BACKENDS, choose_backend
from pallas_kernels.gated_delta.layout import BLOCK, DeltaLayout, DeltaStates, read_state, write_state
from pallas_kernels.gated_delta.problem import DeltaProblem

__all__ = [
    "BACKENDS",
    "BLOCK",
    "DeltaLayout",
    "DeltaProblem",
    "DeltaRows",
    "DeltaStates",
    "DeltaWeights",
    "choose_backend",
    "gated_delta",
    "read_state",
    "write_state",
]
