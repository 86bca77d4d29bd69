"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

Steps whose rows have few tokens are one kernel (`decode.py`), others two (`chunks.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.layout import DeltaStates
from pallas_kernels.gated_delta.problem import DeltaProblem
from pallas_kernels.gated_delta.reference import token_places
from pallas_kernels.gated_delta.triton.chunks import chunks, convolve
from pallas_kernels.gated_delta.triton.decode import decode, reads_and_writes_apart
from pallas_kernels.gated_delta.triton.tiles import Facts, RowRefs, StateRefs, TokenRefs
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16", "float16")
MAX_KEY_DIM = 256

_DECODE_COLUMNS, _DECODE_WARPS = 64, 4
_CHUNK_COLUMNS, _CHUNK_WARPS = 32, 4
_CHUNK = 16


def refusal(problem: DeltaProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype or size of heads), or None."""
    if problem.dtype.name not in DTYPES:
        return f"triton computes gated delta nets in {', '.join(DTYPES)}, not in {problem.dtype.name}"
    if not 16 <= problem.key_dim <= MAX_KEY_DIM or problem.key_dim & (problem.key_dim - 1):
        return f"triton takes keys of 16 to {MAX_KEY_DIM} numbers, a power of two, not of {problem.key_dim}"
    if problem.value_dim % 16:
        return f"triton takes values of a multiple of 16 numbers, not of {problem.value_dim}"
    return None


def gated_delta(
    products: Float[Array, "tokens key_heads width"],
    gates: Float[Array, "tokens key_heads two group"],
    weights: DeltaWeights,
    states: DeltaStates,
    layer: int | Int[Array, ""],
    rows: DeltaRows,
    backend: Backend,
) -> tuple[Float[Array, "tokens value_heads value_dim"], DeltaStates]:
    """Compute `api.gated_delta`."""
    queries = 1 if rows.decode_only else rows.max_queries
    few = queries is not None and reads_and_writes_apart(states, weights.conv.shape[2], queries)
    new = TokenRefs(products, gates, weights.conv, weights.rate, weights.bias)
    of_rows = RowRefs(
        rows.slots,
        rows.query_starts,
        rows.lens,
        rows.folded,
        rows.folded_after,
        rows.sources,
        rows.targets,
        rows.snapshots,
        rows.snapshot_lens,
        jnp.reshape(rows.num_seqs, 1),
        jnp.full((1,), layer, jnp.int32),
    )
    arrays = StateRefs(*jax.tree.leaves(states))
    if few:
        assert queries is not None
        facts = _facts(states, weights, _DECODE_COLUMNS, backend)
        out, arrays = decode(new, arrays, of_rows, queries, facts, _DECODE_WARPS)
    else:
        facts = _facts(states, weights, _CHUNK_COLUMNS, backend)
        x = convolve(new, arrays, of_rows, token_places(rows, len(products)), facts)
        out, arrays = chunks(x, new, arrays, of_rows, _CHUNK, facts, _CHUNK_WARPS)
    return out, DeltaStates(*arrays)


def _facts(states: DeltaStates, weights: DeltaWeights, columns: int, backend: Backend) -> Facts:
    key_dim, value_dim = states.recurrent.shape[3:]
    return Facts(
        group=states.deltas.shape[2] // states.keys.shape[2],
        key_dim=key_dim,
        value_dim=value_dim,
        taps=weights.conv.shape[2],
        ring=states.ring,
        recent=states.recent,
        columns=min(columns, value_dim & -value_dim),
        interpret=backend.interpret,
    )
