"""Attention within packed texts, in both directions and without a cache: `packed_attention`."""

from pallas_kernels.packed_attention.api import packed_attention
from pallas_kernels.packed_attention.arguments import PackedOptions, PackedProblem, Texts
from pallas_kernels.packed_attention.backends import BACKENDS, choose_packed_backend

__all__ = ["BACKENDS", "PackedOptions", "PackedProblem", "Texts", "choose_packed_backend", "packed_attention"]
