"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering. `kernel.py` has its kernel."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Backend
from pallas_kernels.packed_attention.arguments import PackedOptions, PackedProblem, Texts
from pallas_kernels.packed_attention.triton.kernel import TritonPacked, attend
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.paged_attention.triton.block_sizes import prefill_blocks_for, queries_in_registers
from pallas_kernels.paged_attention.triton.prefill import PrefillBlocks
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_DIM = 256
MAX_GROUP = 16
# The size of a page changes no block size
_PAGE_SIZE = 16


def refusal(problem: PackedProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size or number of heads), or None."""
    if problem.dtype.name not in DTYPES:
        return f"triton computes in {', '.join(DTYPES)}, not in {problem.dtype.name}"
    if not 16 <= problem.head_dim <= MAX_HEAD_DIM or problem.head_dim % 8:
        return f"triton takes heads of 16 to {MAX_HEAD_DIM} in steps of 8, not of {problem.head_dim}"
    if problem.heads % problem.kv_heads or problem.heads // problem.kv_heads > MAX_GROUP:
        return f"triton takes up to {MAX_GROUP} query heads a KV head, not {problem.heads} for {problem.kv_heads}"
    return None


def packed_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    texts: Texts,
    options: PackedOptions,
    backend: Backend,
) -> Float[Array, "tokens heads head_dim"]:
    """Compute `api.packed_attention`."""
    (_, heads, head_dim), kv_heads = q.shape, k.shape[1]
    facts = TritonPacked(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=head_dim,
        scale=options.scale,
        reach=options.reach,
        soft_cap=options.soft_cap,
        interpret=backend.interpret,
    )
    problem = Problem(heads, kv_heads, head_dim, _PAGE_SIZE, q.dtype, k.dtype)
    blocks = _blocks_for(problem, backend.target, has_bias=options.distance_bias is not None)
    return attend(q, k, v, texts, options.distance_bias, facts, blocks)


def _blocks_for(problem: Problem, target: KernelTarget, *, has_bias: bool) -> PrefillBlocks:
    """Return the block sizes of paged attention's prefill, but smaller ones where registers don't hold as much here.

    Masks have two sides, and a tile of biases is as large as one of logits.
    """
    sizes = prefill_blocks_for(problem, target)
    if problem.head_dim > 128 and queries_in_registers(target):
        sizes = sizes._replace(block_q=min(sizes.block_q, 32))
    if has_bias:
        programs = max(1, sizes.programs * sizes.num_warps // 8)
        sizes = sizes._replace(block_kv=min(sizes.block_kv, 32), num_warps=8, programs=programs)
    # Half of the stages of a paged kernel hold page ids
    return sizes._replace(num_stages=(sizes.num_stages + 1) // 2)
