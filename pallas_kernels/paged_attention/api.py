"""The public function: one contract, several backends, chosen once from the platform."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.layout import PagedKV

BackendName = Literal["reference"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend and why it was chosen; the reason is for the log."""

    name: BackendName
    reason: str


def choose_backend(platform: str, requested: str = "auto") -> Backend:
    """The backend for a mesh's platform (`cpu`, `cuda`, `tpu`). Raises ValueError for a name that isn't built."""
    if requested not in ("auto", "reference"):
        raise ValueError(f"attention backend {requested!r} is not built; available: reference")
    if requested == "reference":
        return Backend("reference", "asked for")
    return Backend("reference", f"the only backend built for {platform}")


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    kv: PagedKV,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "rows max_pages"],
    query_starts: Int[Array, " rows_plus_1"],
    kv_lens: Int[Array, " rows"],
    num_decodes: Int[Array, ""],
    num_seqs: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    decode_only: bool = False,
    backend: BackendName = "reference",
) -> tuple[Float[Array, "tokens heads head_dim"], PagedKV]:
    """Causal attention of ragged queries over paged keys and values; writes the new `k` and `v` on the way.

    Row r has queries `query_starts[r] : query_starts[r + 1]`, the last of which stands at position `kv_lens[r] - 1`;
    `kv_lens` counts the new tokens. Rows `[0, num_decodes)` have one query each and come first, rows from `num_seqs`
    on are padding and have none; tokens past `query_starts[num_seqs]` are padding, their output is unspecified and
    they are not written. Page ids are local to the layer: page p of layer l is entry `l * pages + p` of the pool.
    Entries of `page_table` beyond a row's pages are never read through: what they point to may hold NaN. So may what
    lies before the windows of all queries of a row, though those entries are ids of pages too.

    `window` counts the positions a query sees, itself included. `soft_cap` bounds logits by `cap * tanh(x / cap)`.
    `sinks` adds a logit per head to the softmax's denominator. `decode_only` is a promise that every row is a decode.

    Returns the attention output in `q`'s dtype, accumulated in float32, and the pool with the new tokens in place.
    """
    assert backend == "reference", backend
    with jax.named_scope("paged_attention"):
        return reference.paged_attention(
            q,
            k,
            v,
            kv,
            layer,
            page_table,
            query_starts,
            kv_lens,
            num_decodes,
            num_seqs,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            decode_only=decode_only,
        )
