"""The arguments of a call besides tokens and states: which rows there are, and the weights that it computes with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.gated_delta.layout import BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaRows:
    """The rows of a step: sequences, which tokens are theirs, and where their states are read and written.

    Row r has tokens `query_starts[r] : query_starts[r + 1]`, the first at position `lens[r]`. Rows from `num_seqs` on
    are padding and have no tokens; tokens past `query_starts[num_seqs]` are padding.

    The state in row `sources[r]` of the pool is that after `folded[r]` tokens, a multiple of `BLOCK`; if that is 0, the
    state is zero, and nothing is read. The slot has entries for the tokens from there to `lens[r]`: fewer than two
    blocks. After the step, `certain[r]` tokens of the sequence stay whatever is drawn; the tokens after them may be
    rejected, so the state is then that of the whole blocks of these (`folded_after`). It is written to `targets[r]`,
    if it has changed or the target isn't the source, unless it is zero. `snapshots[r]` is another row that gets the
    state at the border `snapshot_lens[r]` (a multiple of `BLOCK`, more than `folded[r]`, at most `certain[r]`), or -1.

    No two rows share a slot, a target or a snapshot, and none reads what another writes.

    `decode_only` promises that every row has one token, `max_queries` that none has more than this.
    """

    slots: Int[Array, " rows"]
    query_starts: Int[Array, " rows_plus_1"]
    lens: Int[Array, " rows"]
    folded: Int[Array, " rows"]
    certain: Int[Array, " rows"]
    sources: Int[Array, " rows"]
    targets: Int[Array, " rows"]
    snapshots: Int[Array, " rows"]
    snapshot_lens: Int[Array, " rows"]
    num_seqs: Int[Array, ""]
    decode_only: bool = dataclasses.field(default=False, metadata={"static": True})
    max_queries: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def folded_after(self) -> Int[Array, " rows"]:
        """The tokens that the state has after the step."""
        return jnp.maximum(self.certain // BLOCK * BLOCK, self.folded)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer that the kernels use.

    `conv` has the taps of the convolution of each input, the last for the token itself. `rate` is the logarithm of how
    fast a head decays (`A_log`), `bias` is added before the softplus (`dt_bias`).
    """

    conv: Float[Array, "key_heads width taps"]
    rate: Float32[Array, " value_heads"]
    bias: Float32[Array, " value_heads"]
