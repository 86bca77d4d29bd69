"""The Triton backend: NVIDIA GPUs from Ampere on, by Pallas' Triton lowering.

Steps whose rows have few tokens are one kernel (`decode.py`), others two (`chunks.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HOPPER, Backend
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.layout import DeltaStates
from pallas_kernels.gated_delta.problem import DeltaProblem
from pallas_kernels.gated_delta.reference import token_places
from pallas_kernels.gated_delta.triton.chunks import chunks, convolve
from pallas_kernels.gated_delta.triton.decode import decode, reads_and_writes_apart
from pallas_kernels.gated_delta.triton.tiles import DeltaFacts, DeltaStateRefs, RowRefs, TokenRefs
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16", "float16")
MAX_KEY_DIM = 128

# Columns of a program's values, and its warps. With these, no program spills registers on any target.
_DECODE_COLUMNS, _FEW_DECODE_COLUMNS, _WARPS = 64, 32, 4
_CHUNK_COLUMNS, _CHUNK_COLUMNS_BEFORE_HOPPER = 32, 16
# Streaming multiprocessors, if the target doesn't say how many: Hopper's; and how many programs each runs at once.
_CORES, _AT_ONCE = 132, 2


def refusal(problem: DeltaProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size of heads or of the convolution), or None."""
    if problem.dtype.name not in DTYPES:
        return f"triton computes gated delta nets in {', '.join(DTYPES)}, not in {problem.dtype.name}"
    if not 16 <= problem.key_dim <= MAX_KEY_DIM or problem.key_dim & (problem.key_dim - 1):
        return f"triton takes keys of 16 to {MAX_KEY_DIM} numbers, a power of two, not of {problem.key_dim}"
    if problem.value_dim % 16:
        return f"triton takes values of a multiple of 16 numbers, not of {problem.value_dim}"
    if problem.taps < 2:
        return f"triton takes convolutions of 2 taps or more, not of {problem.taps}"
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
    arrays = DeltaStateRefs(*jax.tree.leaves(states))
    if few:
        assert queries is not None
        facts = _facts(states, weights, _decode_columns(states, len(rows.lens), backend.target), backend)
        out, arrays = decode(new, arrays, of_rows, queries, facts, _WARPS)
    else:
        facts = _facts(states, weights, _chunk_columns(backend.target), backend)
        x = convolve(new, arrays, of_rows, token_places(rows, len(products)), facts)
        out, arrays = chunks(x, new, arrays, of_rows, facts, _WARPS)
    return out, DeltaStates(*arrays)


def _decode_columns(states: DeltaStates, rows: int, target: KernelTarget) -> int:
    """Return how many columns a program of a decode has: fewer if there were too few programs for the device."""
    _, _, heads, _, value_dim = states.recurrent.shape
    programs = rows * heads * value_dim // _DECODE_COLUMNS
    return _DECODE_COLUMNS if programs >= _AT_ONCE * (target.cores or _CORES) else _FEW_DECODE_COLUMNS


def _chunk_columns(target: KernelTarget) -> int:
    """Return how many columns a program of chunks has."""
    if target.capability is not None and target.capability < HOPPER:
        return _CHUNK_COLUMNS_BEFORE_HOPPER
    return _CHUNK_COLUMNS


def _facts(states: DeltaStates, weights: DeltaWeights, columns: int, backend: Backend) -> DeltaFacts:
    key_dim, value_dim = states.recurrent.shape[3:]
    return DeltaFacts(
        group=states.deltas.shape[2] // states.keys.shape[2],
        key_dim=key_dim,
        value_dim=value_dim,
        taps=weights.conv.shape[2],
        ring=states.ring,
        recent=states.recent,
        columns=min(columns, value_dim & -value_dim),
        interpret=backend.interpret,
    )
