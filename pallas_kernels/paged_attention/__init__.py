"""Attention over a paged KV cache: `paged_attention`, `qkv_attention` and the layout of its cache."""

from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.paged_attention.api import (
    as_stored,
    latent_attention,
    paged_attention,
    qkv_attention,
    write_tokens,
)
from pallas_kernels.paged_attention.arguments import AttentionOptions, LatentPreparation, Preparation, Rows
from pallas_kernels.paged_attention.backends import (
    BACKENDS,
    REFERENCE,
    addressable_pages,
    choose_backend,
    kv_platform,
    supports,
    takes_latent_products,
    takes_qkv,
)
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV, kv_layout
from pallas_kernels.paged_attention.pages import read_pages, write_pages
from pallas_kernels.paged_attention.problem import Problem, is_float8, largest_float8
from pallas_kernels.target import KernelTarget, target_of

__all__ = [
    "BACKENDS",
    "REFERENCE",
    "AttentionOptions",
    "Backend",
    "BackendName",
    "KVLayout",
    "KernelTarget",
    "LatentPreparation",
    "PagedKV",
    "Preparation",
    "Problem",
    "Rows",
    "addressable_pages",
    "as_stored",
    "choose_backend",
    "is_float8",
    "kv_layout",
    "kv_platform",
    "largest_float8",
    "latent_attention",
    "paged_attention",
    "qkv_attention",
    "read_pages",
    "supports",
    "takes_latent_products",
    "takes_qkv",
    "target_of",
    "write_pages",
    "write_tokens",
]
