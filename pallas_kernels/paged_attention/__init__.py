"""Attention over a paged KV cache: `paged_attention`, `qkv_attention` and the layout of its cache."""

from pallas_kernels.paged_attention.api import paged_attention, qkv_attention
from pallas_kernels.paged_attention.backends import REFERENCE, Backend, BackendName, choose_backend
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV, kv_layout
from pallas_kernels.paged_attention.pages import read_pages, write_pages
from pallas_kernels.paged_attention.problem import Problem, is_float8, largest_float8
from pallas_kernels.target import KernelTarget, target_of

__all__ = [
    "REFERENCE",
    "Backend",
    "BackendName",
    "KVLayout",
    "KernelTarget",
    "PagedKV",
    "Problem",
    "choose_backend",
    "is_float8",
    "kv_layout",
    "largest_float8",
    "paged_attention",
    "qkv_attention",
    "read_pages",
    "target_of",
    "write_pages",
]
