"""Attention over a paged KV cache: `paged_attention` and the layout of its cache."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.backends import (
    REFERENCE,
    Backend,
    BackendName,
    Problem,
    Target,
    choose_backend,
    target_of,
)
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV, kv_layout
from pallas_kernels.paged_attention.pages import read_pages, write_pages

__all__ = [
    "REFERENCE",
    "Backend",
    "BackendName",
    "KVLayout",
    "PagedKV",
    "Problem",
    "Target",
    "choose_backend",
    "kv_layout",
    "paged_attention",
    "read_pages",
    "target_of",
    "write_pages",
]
