"""Attention over a paged KV cache: `paged_attention` and the layout of its cache."""

from pallas_kernels.paged_attention.api import Backend, BackendName, choose_backend, paged_attention
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV, kv_layout

__all__ = ["Backend", "BackendName", "KVLayout", "PagedKV", "choose_backend", "kv_layout", "paged_attention"]
