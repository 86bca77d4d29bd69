"""The contract in plain XLA: a loop over rows and their blocks. Every backend must agree with it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.layout import BLOCK, DeltaStates

_NORM_EPS = 1e-6
_HIGHEST = lax.Precision.HIGHEST


class Prepared(NamedTuple):
    """The tokens of a step after the convolution, in float32, with queries and keys repeated for each value head."""

    q: Float32[Array, "tokens value_heads key_dim"]
    k: Float32[Array, "tokens value_heads key_dim"]
    v: Float32[Array, "tokens value_heads value_dim"]
    beta: Float32[Array, "tokens value_heads"]
    decay: Float32[Array, "tokens value_heads"]


class _Carry(NamedTuple):
    """The arrays that the loop over blocks updates; `state` belongs to the current row."""

    state: Float32[Array, "value_heads key_dim value_dim"]
    recurrent: Float32[Array, "states value_heads key_dim value_dim"]
    keys: Float32[Array, "slots value_heads ring key_dim"]
    deltas: Float32[Array, "slots value_heads ring value_dim"]
    decays: Float32[Array, "slots value_heads ring"]
    out: Float32[Array, "tokens value_heads value_dim"]


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
    own = [lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in jax.tree.leaves(states)]
    recurrent, tails, keys, deltas, decays, inputs = own
    group = deltas.shape[1] // keys.shape[1]
    prepared = prepare(products, gates, weights, states, layer, rows)
    begin = _Carry(
        jnp.zeros(recurrent.shape[1:], jnp.float32),
        recurrent,
        jnp.repeat(keys, group, axis=1),
        deltas,
        decays,
        jnp.zeros(prepared.v.shape, jnp.float32),
    )
    end = lax.fori_loop(0, rows.num_seqs, lambda r, carry: _row(r, carry, prepared, rows), begin)
    tails, last = keep_tails(tails, inputs, products, rows), last_inputs(inputs, products, rows)
    slots = jnp.where(jnp.arange(len(rows.slots)) < rows.num_seqs, rows.slots, len(inputs))
    inputs = inputs.at[slots].set(last, mode="drop")
    new = end.recurrent, tails, end.keys[:, ::group], end.deltas, end.decays, inputs
    updated = [
        lax.dynamic_update_index_in_dim(whole, one, layer, 0) for whole, one in zip(jax.tree.leaves(states), new)
    ]
    return end.out.astype(products.dtype), DeltaStates(*updated)


def prepare(
    products: Float[Array, "tokens key_heads width"],
    gates: Float[Array, "tokens key_heads two group"],
    weights: DeltaWeights,
    states: DeltaStates,
    layer: int | Int[Array, ""],
    rows: DeltaRows,
) -> Prepared:
    """Return queries, keys, values, beta and the logarithm of the decay of each token."""
    key_dim, value_dim = states.recurrent.shape[3:]
    tokens, key_heads, _ = products.shape
    group = states.recurrent.shape[2] // key_heads
    tails, inputs = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (states.tails, states.inputs))
    taps = weights.conv.shape[2]
    row, position = token_places(rows, tokens)
    total = jnp.zeros(products.shape, jnp.float32)
    for tap in range(taps):
        found = inputs_at(row, position - (taps - 1 - tap), products, tails, inputs, rows)
        total += found.astype(jnp.float32) * weights.conv[:, :, tap].astype(jnp.float32)
    x = jax.nn.silu(total).astype(products.dtype).astype(jnp.float32)
    q, k, v = jnp.split(x, [key_dim, 2 * key_dim], axis=2)
    q, k = (part * lax.rsqrt(jnp.sum(part * part, axis=2, keepdims=True) + _NORM_EPS) for part in (q, k))
    b, a = (gates[:, :, i].astype(jnp.float32).reshape(tokens, -1) for i in range(2))
    return Prepared(
        jnp.repeat(q * key_dim**-0.5, group, axis=1),
        jnp.repeat(k, group, axis=1),
        v.reshape(tokens, -1, value_dim),
        jax.nn.sigmoid(b),
        -jnp.exp(weights.rate) * jax.nn.softplus(a + weights.bias),
    )


def token_places(rows: DeltaRows, tokens: int) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Return each token's row and position; for padding, anything."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(rows.query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, len(rows.lens) - 1)
    return row, rows.lens[row] + token - rows.query_starts[row]


def inputs_at(
    row: Int[Array, "*some"],
    position: Int[Array, "*some"],
    products: Float[Array, "tokens key_heads width"],
    tails: Float[Array, "states key_heads taps_before width"],
    inputs: Float[Array, "slots key_heads recent width"],
    rows: DeltaRows,
) -> Float[Array, "*some key_heads width"]:
    """Return the input of the convolution of a row at a position: of this step, from its slot, or from its state."""
    lens, folded = rows.lens[row], rows.folded[row]
    token = rows.query_starts[row] + position - lens
    new = products.at[token].get(mode="clip")
    kept = inputs.at[rows.slots[row], :, position % inputs.shape[2]].get(mode="clip")
    before = tails.at[rows.sources[row], :, jnp.clip(position - folded + tails.shape[2], 0, tails.shape[2] - 1)]
    choice = jnp.where(position < folded, 1, jnp.where(position < lens, 2, 3))
    choice = jnp.where(position < 0, 0, choice)[..., None, None]
    options = [jnp.zeros((), products.dtype), before.get(mode="clip"), kept, new]
    return jnp.select([choice == i for i in range(4)], options)


def writes_target(rows: DeltaRows) -> Bool[Array, " rows"]:
    """Return which rows write their target."""
    live = jnp.arange(len(rows.lens)) < rows.num_seqs
    after = rows.folded_after
    return live & (after > 0) & ((after != rows.folded) | (rows.targets != rows.sources))


def keep_tails(
    tails: Float[Array, "states key_heads taps_before width"],
    inputs: Float[Array, "slots key_heads recent width"],
    products: Float[Array, "tokens key_heads width"],
    rows: DeltaRows,
) -> Float[Array, "states key_heads taps_before width"]:
    """Return the inputs of the convolution before borders, those at which a state is kept replaced."""
    row = jnp.arange(len(rows.lens), dtype=jnp.int32)
    new_tails = tails
    for wanted, border, to in (
        (writes_target(rows), rows.folded_after, rows.targets),
        ((row < rows.num_seqs) & (rows.snapshots >= 0), rows.snapshot_lens, rows.snapshots),
    ):
        at = border[:, None] + jnp.arange(-tails.shape[2], 0, dtype=jnp.int32)
        found = inputs_at(jnp.broadcast_to(row[:, None], at.shape), at, products, tails, inputs, rows)
        to = jnp.where(wanted, to, len(tails))
        new_tails = new_tails.at[to].set(jnp.moveaxis(found, 1, 2), mode="drop")
    return new_tails


def last_inputs(
    inputs: Float[Array, "slots key_heads recent width"],
    products: Float[Array, "tokens key_heads width"],
    rows: DeltaRows,
) -> Float[Array, "rows key_heads recent width"]:
    """Return the inputs of the convolution that the slot of each row has after the step."""
    recent = inputs.shape[2]
    ends = (rows.lens + rows.query_starts[1:] - rows.query_starts[:-1])[:, None]
    position = ends - recent + (jnp.arange(recent, dtype=jnp.int32) - ends) % recent
    token = rows.query_starts[:-1, None] + position - rows.lens[:, None]
    found = jnp.moveaxis(products.at[token].get(mode="clip"), 1, 2)
    new = (position >= rows.lens[:, None])[:, None, :, None]
    return jnp.where(new, found, inputs.at[rows.slots].get(mode="clip"))


def _row(r: Int[Array, ""], carry: _Carry, prepared: Prepared, rows: DeltaRows) -> _Carry:
    """Compute the blocks of a row."""
    folded, source = rows.folded[r], rows.sources[r]
    after = rows.folded_after[r]
    state = carry.recurrent.at[source].get(mode="clip")
    state = jnp.where(folded > 0, state, 0)
    moved = (after == folded) & (after > 0) & (rows.targets[r] != source)
    carry = carry._replace(state=state, recurrent=_set(carry.recurrent, rows.targets[r], state, moved))
    end = rows.lens[r] + rows.query_starts[r + 1] - rows.query_starts[r]

    def block(b: Int[Array, ""], carry: _Carry) -> _Carry:
        return _block(b, r, end, carry, prepared, rows)

    return lax.fori_loop(folded // BLOCK, (end + BLOCK - 1) // BLOCK, block, carry)


def _block(
    b: Int[Array, ""], r: Int[Array, ""], end: Int[Array, ""], carry: _Carry, prepared: Prepared, rows: DeltaRows
) -> _Carry:
    """Compute the new tokens of a row in block `b`, and fold it into the state if it is full."""
    slot, first = rows.slots[r], rows.lens[r]
    position = b * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    entry = position % carry.keys.shape[2]
    is_old, is_new = position < first, (position >= first) & (position < end)
    token = jnp.clip(rows.query_starts[r] + position - first, 0, len(prepared.q) - 1)
    mine: Prepared = jax.tree.map(lambda x: x[token], prepared)
    new = is_new[:, None, None]

    def pick(kept: Array, fresh: Array) -> Array:
        kept = jnp.moveaxis(kept[slot][:, entry], 1, 0)
        old = is_old.reshape(-1, *(1,) * (kept.ndim - 1))
        live = (is_old | is_new).reshape(old.shape)
        return jnp.where(live, jnp.where(old, kept, fresh), 0)

    k = pick(carry.keys, mine.k)
    known = pick(carry.decays, jnp.zeros_like(mine.decay))
    before = jnp.where(is_old.any(), known[jnp.maximum(is_old.sum() - 1, 0)], 0)
    log_decay = jnp.where(is_old[:, None], known, before + jnp.cumsum(jnp.where(new[:, 0], mine.decay, 0), axis=0))
    # From here on, heads come first.
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (jnp.where(new, mine.q, 0), k, jnp.where(new, mine.v, 0)))
    log_decay, beta = log_decay.T, jnp.where(new[:, :, 0], mine.beta, 0).T
    index = jnp.arange(BLOCK)
    weight = jnp.exp(jnp.where(index[:, None] >= index, log_decay[:, :, None] - log_decay[:, None], -jnp.inf))
    of_keys = jnp.einsum("hid,hjd->hij", k, k, precision=_HIGHEST) * weight
    of_queries = jnp.einsum("hid,hjd->hij", q, k, precision=_HIGHEST) * weight
    read = jnp.einsum("hid,hdv->hiv", jnp.concatenate([k, q], axis=1), carry.state, precision=_HIGHEST)
    read_keys, read_queries = jnp.split(read, 2, axis=1)
    decay = jnp.exp(log_decay)[:, :, None]
    delta = jnp.swapaxes(pick(carry.deltas, jnp.zeros_like(mine.v)), 0, 1)
    wanted = v - decay * read_keys
    for i in range(BLOCK):
        seen = jnp.einsum("hj,hjv->hv", of_keys[:, i, :i], delta[:, :i], precision=_HIGHEST)
        found = beta[:, i, None] * (wanted[:, i] - seen)
        delta = delta.at[:, i].set(jnp.where(is_new[i], found, delta[:, i]))
    out = decay * read_queries + jnp.einsum("hij,hjv->hiv", of_queries, delta, precision=_HIGHEST)
    left = jnp.exp(log_decay[:, -1:] - log_decay)[:, :, None]
    state = decay[:, -1:] * carry.state + jnp.einsum("hid,hiv->hdv", k * left, delta, precision=_HIGHEST)
    border = (b + 1) * BLOCK
    full = border <= end
    recurrent = _set(carry.recurrent, rows.targets[r], state, full & (border == rows.folded_after[r]))
    taken = full & (rows.snapshots[r] >= 0) & (border == rows.snapshot_lens[r])
    recurrent = _set(recurrent, rows.snapshots[r], state, taken)
    kept = jnp.where(is_new & (position >= rows.folded_after[r]), entry, carry.keys.shape[2])
    return _Carry(
        jnp.where(full, state, carry.state),
        recurrent,
        carry.keys.at[slot, :, kept].set(jnp.swapaxes(k, 0, 1), mode="drop"),
        carry.deltas.at[slot, :, kept].set(jnp.swapaxes(delta, 0, 1), mode="drop"),
        carry.decays.at[slot, :, kept].set(log_decay.T, mode="drop"),
        carry.out.at[jnp.where(is_new, token, len(carry.out))].set(jnp.swapaxes(out, 0, 1), mode="drop"),
    )


def _set(pool: Array, row: Int[Array, ""], value: Array, wanted: Bool[Array, ""]) -> Array:
    """Return the pool with another row, if it is wanted."""
    return pool.at[jnp.where(wanted, row, len(pool))].set(value, mode="drop")
