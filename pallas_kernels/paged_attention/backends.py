"""The choice of a backend for a problem, decided once before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jaxtyping import Array

from pallas_kernels.dispatch import Backend, BackendTable
from pallas_kernels.paged_attention.layout import KVLayout, PagedKV
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.target import KernelTarget

REFERENCE = Backend(reason="the default of this function")


class AttentionModule(Protocol):
    """The functions that every backend's module has.

    Some also have `qkv_attention` and `latent_attention`, which take the products of the projections as they are,
    `write_tokens`, and `addressable_pages`.
    """

    def refusal(self, problem: Problem, target: KernelTarget) -> str | None:
        """Return why the backend doesn't support this problem on this target, or None."""

    def paged_attention(self, *arguments: Any) -> tuple[Array, PagedKV]:
        """Compute `api.paged_attention`."""


# The best backend comes first.
#
# On Hopper triton comes before mosaic_gpu, by these measurements of an H100 with the heads of Llama-3.1-8B:
# - Decode: both read keys and values at 0.9 to 1.0 of a copy's speed from 4,096 tokens on; at 1,024, triton at 0.71 to
#   0.90 and mosaic_gpu at 0.63 to 0.83. mosaic_gpu has one program a core and dead ones where few rows decode, and XLA
#   writes the tokens and combines the parts.
# - Prefill: 213 and 145 TFLOP/s at 2,048 tokens, 270 and 258 at 4,096, 303 and 380 at 8,192, 317 and 475 at 16,384. In
#   triton both warpgroups wait for QK and meet at barriers; in mosaic_gpu they run apart, but XLA packs its queries and
#   unpacks its output. So it wins only for long prompts.
BACKENDS = BackendTable[AttentionModule](
    "paged_attention",
    names=("reference", "cpu", "triton", "mosaic_tpu", "mosaic_gpu"),
    preferred={"cuda": ("triton",), "gpu": ("triton",), "tpu": ("mosaic_tpu",), "cpu": ("cpu",)},
)


def choose_backend(target: KernelTarget, problem: Problem | Sequence[Problem], requested: str = "auto") -> Backend:
    """Return the backend for a deployment, which supports each of its problems.

    Raises ValueError, with the reason, if the requested one doesn't fit.
    """
    problems = [(one,) for one in ([problem] if isinstance(problem, Problem) else problem)]
    if requested == "auto":
        return BACKENDS.choose(target, *problems)
    return BACKENDS.check_requested(requested, target, *problems)


def supports(backend: Backend, problem: Problem) -> bool:
    """Return whether a backend that was chosen for other problems supports this one, too."""
    return BACKENDS.refusal(backend.name, backend.target, (problem,)) is None


def kv_platform(backend: Backend) -> str:
    """Return the platform for `kv_layout`: a TPU's kernel reads a TPU's pool, also if it is interpreted."""
    return "tpu" if backend.name == "mosaic_tpu" else backend.target.platform


def takes_qkv(backend: Backend) -> bool:
    """Return whether the backend has `qkv_attention`."""
    return backend.name in ("triton", "mosaic_gpu")


def takes_latent_products(backend: Backend) -> bool:
    """Return whether the backend has `latent_attention`."""
    return backend.name == "triton"


def addressable_pages(backend: Backend, layout: KVLayout, shards: int) -> int:
    """Return how many of a layer's pages the kernels can address, the heads being split among `shards`."""
    module: Any = BACKENDS.module(backend.name)
    return module.addressable_pages(layout, shards) if hasattr(module, "addressable_pages") else layout.num_pages
