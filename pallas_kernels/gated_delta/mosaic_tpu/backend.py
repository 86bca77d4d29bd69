"""The TPU backend: XLA convolves and sorts tokens into blocks, a kernel updates states (`kernel.py`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.layout import BLOCK, DeltaStates
from pallas_kernels.gated_delta.mosaic_tpu.blocks import RowBlocks, list_blocks
from pallas_kernels.gated_delta.mosaic_tpu.decode import compute_decodes, factors_of, max_ring
from pallas_kernels.gated_delta.mosaic_tpu.kernel import BlockTokens, DeltaHeads, DeltaPools, compute_blocks
from pallas_kernels.gated_delta.mosaic_tpu.slots import write_slots
from pallas_kernels.gated_delta.problem import DeltaProblem
from pallas_kernels.gated_delta.reference import Prepared, keep_tails, last_inputs, prepare, token_places
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16")
LANES = 128

# Three quarters of the vector memory of a core that has least of it.
_VMEM_LIMIT = 48 * 2**20
# Of the states of a row, the kernel has two that are read ahead, the current one and a copy.
_STATE_BYTES = _VMEM_LIMIT // 8


def refusal(problem: DeltaProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size or number of heads), or None."""
    if problem.dtype.name not in DTYPES:
        return f"mosaic_tpu computes gated delta nets in {' and '.join(DTYPES)}, not in {problem.dtype.name}"
    for name, dim in (("keys", problem.key_dim), ("values", problem.value_dim)):
        if dim % LANES:
            return f"mosaic_tpu takes {name} of a multiple of {LANES} numbers, not of {dim}"
    size = problem.value_heads * problem.key_dim * problem.value_dim * 4
    if size > _STATE_BYTES:
        return (
            f"mosaic_tpu takes states of up to {_STATE_BYTES // 2**20} MiB, and {problem.value_heads} heads take "
            f"{size // 2**20}: split the heads among more devices"
        )
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
    value_heads, key_dim, value_dim = states.recurrent.shape[2:]
    num_slots, key_heads, ring = states.keys.shape[1:4]
    heads = DeltaHeads(key_heads, value_heads // key_heads, key_dim, value_dim)
    flat = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), states)
    rows = _of_layer(rows, layer * states.num_states, layer * num_slots)
    # Inputs are taken out of whole slots: single ones would change the layout of the array, and so copy it.
    own, by_row = (
        flat.inputs[0].at[rows.slots].get(mode="clip"),
        dataclasses.replace(rows, slots=jnp.arange(len(rows.slots))),
    )
    prepared = prepare(products, gates, weights, dataclasses.replace(flat, inputs=own[None]), 0, by_row)
    pools = DeltaPools(flat.recurrent[0], flat.keys[0], flat.deltas[0])
    if rows.decode_only and ring <= max_ring(LANES):
        out, pools, decays = _decode(prepared, flat, pools, rows, heads, backend)
    else:
        out, pools, decays = _chunks(prepared, flat, pools, rows, heads, backend)
    tails = keep_tails(flat.tails[0], own, products, by_row)
    last = last_inputs(own, products, by_row)
    inputs = write_slots(flat.inputs[0], last, rows.slots, rows.num_seqs, interpret=backend.interpret)
    new = pools.recurrent, tails, pools.keys, pools.deltas, decays, inputs
    updated = (x.reshape(old.shape) for x, old in zip(new, jax.tree.leaves(states), strict=True))
    return out.astype(products.dtype), DeltaStates(*updated)


def _decode(
    prepared: Prepared, flat: DeltaStates, pools: DeltaPools, rows: DeltaRows, heads: DeltaHeads, backend: Backend
) -> tuple[Float32[Array, "rows value_heads value_dim"], DeltaPools, Float32[Array, "slots value_heads ring"]]:
    """Return the outputs of rows of one token, the pools, and the decays of the slots."""
    decays = flat.decays[0]
    factors, known = factors_of(prepared.beta, prepared.decay, decays, rows)
    q, k = (x[:, :: heads.group] for x in (prepared.q, prepared.k))
    out, pools = compute_decodes(
        q, k, prepared.v, factors, pools, rows, heads, vmem_limit=_VMEM_LIMIT, interpret=backend.interpret
    )
    live = jnp.arange(len(rows.lens)) < rows.num_seqs
    return out, pools, decays.at[jnp.where(live, rows.slots, len(decays))].set(known, mode="drop")


def _chunks(
    prepared: Prepared, flat: DeltaStates, pools: DeltaPools, rows: DeltaRows, heads: DeltaHeads, backend: Backend
) -> tuple[Float32[Array, "tokens value_heads value_dim"], DeltaPools, Float32[Array, "slots value_heads ring"]]:
    """Return the outputs of rows of any number of tokens, the pools, and the decays of the slots."""
    decays, tokens = flat.decays[0], len(prepared.q)
    blocks = list_blocks(rows, tokens, decays.shape[2])
    totals = _totals(blocks, prepared, decays)
    new = blocks.new[:, None, :, None]

    def in_blocks(x: Array) -> Array:
        return jnp.where(new, jnp.swapaxes(x[blocks.token], 1, 2), 0)

    beta = in_blocks(prepared.beta[:, :, None])
    in_order = BlockTokens(
        q=in_blocks(prepared.q[:, :: heads.group]),
        k=in_blocks(prepared.k[:, :: heads.group]),
        v=in_blocks(prepared.v),
        factors=jnp.concatenate([beta, totals[:, :, :, None]], axis=3),
    )
    out, pools = compute_blocks(
        blocks.num_blocks, blocks.facts, in_order, pools, heads, vmem_limit=_VMEM_LIMIT, interpret=backend.interpret
    )
    block, within = _place(blocks, rows, *token_places(rows, tokens))
    return out[block, :, within], pools, _keep_decays(decays, totals, blocks, rows)


def _of_layer(rows: DeltaRows, first_state: int | Array, first_slot: int | Array) -> DeltaRows:
    """Return the rows with states and slots that count those of all layers."""
    snapshots = jnp.where(rows.snapshots < 0, rows.snapshots, rows.snapshots + first_state)
    sources, targets = rows.sources + first_state, rows.targets + first_state
    return dataclasses.replace(
        rows, slots=rows.slots + first_slot, sources=sources, targets=targets, snapshots=snapshots
    )


def _totals(
    blocks: RowBlocks, prepared: Prepared, decays: Float32[Array, "slots value_heads ring"]
) -> Float32[Array, "blocks value_heads block"]:
    """Return the decays of each token, summed from its block on."""
    entry = blocks.position % decays.shape[2]
    known = jnp.swapaxes(decays[blocks.facts.slot[:, None], :, entry], 1, 2)
    index, old = jnp.arange(BLOCK), blocks.facts.old[:, None, None]
    last = jnp.sum(jnp.where(index == old - 1, known, 0), axis=2, keepdims=True)
    decay = jnp.where(blocks.new[:, None], jnp.swapaxes(prepared.decay[blocks.token], 1, 2), 0)
    return jnp.where(index < old, known, last + jnp.cumsum(decay, axis=2))


def _place(
    blocks: RowBlocks, rows: DeltaRows, row: Int[Array, "*some"], position: Int[Array, "*some"]
) -> tuple[Int[Array, "*some"], Int[Array, "*some"]]:
    """Return in which block a token of a row is, and where in it."""
    block = blocks.starts[row] + (position - rows.folded[row]) // BLOCK
    return jnp.clip(block, 0, len(blocks.row) - 1), position % BLOCK


def _keep_decays(
    decays: Float32[Array, "slots value_heads ring"],
    totals: Float32[Array, "blocks value_heads block"],
    blocks: RowBlocks,
    rows: DeltaRows,
) -> Float32[Array, "slots value_heads ring"]:
    """Return the decays with those of new tokens that the state doesn't have."""
    ring, row = decays.shape[2], jnp.arange(len(rows.lens))[:, None]
    ends = (rows.lens + rows.query_starts[1:] - rows.query_starts[:-1])[:, None]
    after = rows.folded_after[:, None]
    # The token of each entry from the border on.
    position = after + (jnp.arange(ring) - after) % ring
    kept = (position >= rows.lens[:, None]) & (position < ends)
    block, within = _place(blocks, rows, jnp.broadcast_to(row, position.shape), position)
    found = jnp.where(kept[:, None], jnp.swapaxes(totals[block, :, within], 1, 2), decays[rows.slots])
    live = jnp.arange(len(rows.lens)) < rows.num_seqs
    return decays.at[jnp.where(live, rows.slots, len(decays))].set(found, mode="drop")
