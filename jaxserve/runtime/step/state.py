"""The state that stays on the devices between steps. Each program takes it as a donated argument and returns it.

Every array has a leading axis of data-parallel ranks. `one_rank` removes it where a program begins and `all_ranks` adds
it back where the program ends, so that nothing inside sees it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.api_types import MAX_LOGIT_BIAS, MAX_STOP_IDS
from jaxserve.layers.batch import KVPools, paged_pool
from jaxserve.models.layout import AnyModel
from jaxserve.params import KVSpec, StateSpec
from jaxserve.runtime.step.draft_model import DraftModel
from jaxserve.step_plan import Capacity
from pallas_kernels.gated_delta import DeltaLayout, DeltaStates
from pallas_kernels.ngram_lookup import NgramIndex, NgramLookup
from pallas_kernels.paged_attention import KVLayout, PagedKV, is_float8, kv_layout
from pallas_kernels.sampling.parameters import FloatColumn, IntColumn

# Entries of a slot's table of n-grams; of longer sequences, n-grams of the same hash replace each other more often.
_MAX_ENTRIES = 2**14

_F32 = np.dtype(np.float32)


class SlotColumn(enum.IntEnum):
    """The columns of `SamplingRows.ints` after those of `IntColumn`.

    `FILL_LEN` is the number of tokens that were known when the slot was opened. `CONSTRAINED` says that a grammar
    decides which tokens may be drawn.
    """

    FILL_LEN = len(IntColumn)
    CONSTRAINED = len(IntColumn) + 1


INT_COLUMNS = (*IntColumn, *SlotColumn)


@flax.struct.dataclass
class SamplingRows:
    """The sampling parameters by slot: `INT_COLUMNS`, the columns of `FloatColumn`, stop ids and logit bias."""

    ints: Int[Array, "slots ints"]
    floats: Float[Array, "slots floats"]
    stop_ids: Int[Array, "slots stop_ids"]
    bias_ids: Int[Array, "slots bias"]
    bias_values: Float[Array, "slots bias"]


@flax.struct.dataclass
class Drafts:
    """The draft tokens of each slot for its next step, `counts` of them valid, and the data that they are made from.

    That data is an index of n-grams, or the tokens of the sequences and a draft model's keys and values of them. The
    keys and values are on the pages of the first KV group, as are the features of the model that a head needs.
    """

    tokens: Int[Array, "slots max_drafts"]
    counts: Int[Array, " slots"]
    ngrams: NgramIndex | None
    history: Int[Array, "slots max_tokens"] | None = None
    kv: PagedKV | None = None
    features: Float[Array, "pages page_size dim"] | None = None


@flax.struct.dataclass
class SequenceStates:
    """The states of layers that keep one for each sequence; by slot, the row of the pool that has its state, and how
    many tokens that state has."""

    pool: DeltaStates
    rows: Int[Array, " slots"]
    folded: Int[Array, " slots"]


@flax.struct.dataclass
class DeviceState:
    """The KV pool and the page table by slot of each KV group; by slot: last token, sequence length, sampling
    parameters, penalty counts and, with speculation, drafts; and how many tokens each expert of a mixture has computed.

    `hidden` is the hidden state of the last token of each slot that a grammar constrains, from which its next one is
    drawn. `counts` says how often each token was output; its sign bit is set for tokens of the prompt. Rows of slots
    without penalties hold anything, as only penalties read them. Of several pipeline stages, only the last one has
    these two. `states` are None if no layer keeps states. `pooled` is the sum of the hidden states of each slot's
    sequence so far, if the mean of all is wanted.
    """

    kv: tuple[PagedKV, ...]
    last_tokens: Int[Array, " slots"]
    seq_lens: Int[Array, " slots"]
    page_tables: tuple[Int[Array, "slots max_pages"], ...]
    sampling: SamplingRows
    counts: Int[Array, "slots vocab"] | None
    hidden: Float[Array, "slots dim"] | None
    expert_tokens: UInt32[Array, "mixtures experts"] | None
    states: SequenceStates | None = None
    pooled: Float[Array, "slots dim"] | None = None
    drafts: Drafts | None = None

    @property
    def pools(self) -> KVPools:
        """What layers read and write: the pools of all KV groups, and that of states."""
        return self.kv if self.states is None else (*self.kv, self.states.pool)

    def with_pools(self, pools: KVPools) -> DeviceState:
        """Return the state with other `pools`."""
        kv, states = tuple(paged_pool(pools, group) for group in range(len(self.kv))), self.states
        if states is not None:
            states = dataclasses.replace(states, pool=pools[-1])  # type: ignore[arg-type]
        return dataclasses.replace(self, kv=kv, states=states)

    @property
    def request_arrays(self) -> list[Array]:
        """The arrays of which a step uses a part that depends on its requests: the pools of all KV groups and of a
        draft model, and all states."""
        drafted = None if self.drafts is None else self.drafts.kv
        paged = self.kv if drafted is None else (*self.kv, drafted)
        states = [] if self.states is None else jax.tree.leaves(self.states.pool)
        return [pool for group in paged for pool in group.pools] + states


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape, dtype and logical axes of one array of the state."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes over all shards."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def pool_layout(spec: KVSpec, *, num_pages: int, page_size: int, dtype: np.dtype, platform: str = "cpu") -> KVLayout:
    """Return the layout of a KV group's pool on a platform (jax's name for it)."""
    return kv_layout(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        platform=platform,
        value_dim=spec.value_dim,
    )


def delta_layout(spec: StateSpec, dtype: np.dtype, max_drafts: int) -> DeltaLayout:
    """Return the layout of the states of a group of layers, whose inputs have this dtype."""
    heads = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
    return DeltaLayout(spec.num_layers, *heads, spec.taps, dtype, max_drafts)


def max_pages(capacity: Capacity) -> int:
    """Return the width of a page table."""
    return -(-capacity.max_model_len // capacity.page_size)


def state_specs(
    model: AnyModel,
    capacity: Capacity,
    *,
    kv_dtype: np.dtype,
    dtype: np.dtype = _F32,
    platform: str = "cpu",
    drafter: NgramLookup | DraftModel | None = None,
) -> DeviceState:
    """Return the state of a model on a platform (jax's name for it), with an `ArraySpec` in place of each array.

    `dtype` is that of hidden states and features. A bidirectional model has no sequences to keep anything of.
    """
    counts = expert_tokens_spec(model, capacity.num_ranks, len(model.mixture_layers))
    if model.config.bidirectional:
        none: dict[str, Any] = dict.fromkeys(("last_tokens", "seq_lens", "sampling", "counts", "hidden"))
        return DeviceState(kv=(), page_tables=(), expert_tokens=counts, **none)  # type: ignore[arg-type]
    ranks, slots, specs = capacity.num_ranks, capacity.num_slots, model.kv_specs()
    i32, f32 = np.dtype(np.int32), np.dtype(np.float32)

    def by_slot(dtype: np.dtype, *width: int) -> Any:
        return ArraySpec((ranks, slots, *width), dtype, ("ranks", None) + (None,) * len(width))

    def pool(spec: KVSpec, num_pages: int) -> Any:
        layout = pool_layout(spec, num_pages=num_pages, page_size=capacity.page_size, dtype=kv_dtype, platform=platform)
        keys, values = (
            ArraySpec((ranks, *shape), layout.dtype, ("ranks", *layout.axes))
            for shape in (layout.shape, layout.values_shape)
        )
        scales = ArraySpec((ranks, 2, spec.num_layers, spec.num_kv_heads), f32, ("ranks", None, None, "kv_heads"))
        pool = layout.paged_kv(keys, values, scales if is_float8(kv_dtype) else None)
        return jax.tree.map(lambda array: array if array.nbytes else _undivided(array), pool)

    return DeviceState(
        kv=tuple(map(pool, specs, capacity.pages_by_group)),
        last_tokens=by_slot(i32),
        seq_lens=by_slot(i32),
        page_tables=tuple(by_slot(i32, max_pages(capacity)) for _ in specs),
        sampling=SamplingRows(
            ints=by_slot(i32, len(INT_COLUMNS)),
            floats=by_slot(f32, len(FloatColumn)),
            stop_ids=by_slot(i32, MAX_STOP_IDS),
            bias_ids=by_slot(i32, MAX_LOGIT_BIAS),
            bias_values=by_slot(f32, MAX_LOGIT_BIAS),
        ),
        counts=dataclasses.replace(by_slot(np.dtype(np.int16), model.padded_vocab_size), axes=("ranks", None, "vocab"))
        if model.draws
        else None,
        hidden=by_slot(dtype, model.config.hidden_size) if model.draws else None,
        expert_tokens=counts,  # type: ignore[arg-type]
        pooled=by_slot(f32, model.config.hidden_size) if sums_tokens(model) else None,
        drafts=None if drafter is None else _draft_specs(drafter, capacity, dtype, by_slot, pool),
        states=_sequence_states(model.state_spec(), capacity, dtype, by_slot),
    )


def sums_tokens(model: AnyModel) -> bool:
    """Return whether the hidden states of a sequence are added up."""
    return model.is_last and model.config.pooling is not None and model.config.pooling.method == "mean"


def _sequence_states(
    spec: StateSpec | None, capacity: Capacity, dtype: np.dtype, by_slot: Callable[..., Any]
) -> SequenceStates | None:
    if spec is None:
        return None
    layout = delta_layout(spec, dtype, capacity.max_drafts)
    shapes = *layout.pool_shapes(capacity.num_states), *layout.slot_shapes(capacity.num_slots)
    f32 = np.dtype(np.float32)
    arrays = [
        ArraySpec((capacity.num_ranks, *shape), kind, ("ranks", None, None, "heads") + (None,) * (len(shape) - 3))
        for shape, kind in zip(shapes, (f32, dtype, f32, f32, f32, dtype), strict=True)
    ]
    pool = DeltaStates(*(one if one.nbytes else _undivided(one) for one in arrays))  # type: ignore[arg-type]
    i32 = np.dtype(np.int32)
    return SequenceStates(pool, by_slot(i32), by_slot(i32))


def _draft_specs(
    drafter: NgramLookup | DraftModel,
    capacity: Capacity,
    dtype: np.dtype,
    by_slot: Callable[..., Any],
    pool: Callable[[KVSpec, int], Any],
) -> Drafts:
    i32, max_tokens = np.dtype(np.int32), capacity.max_model_len
    tokens, counts = by_slot(i32, drafter.max_drafts), by_slot(i32)
    if isinstance(drafter, DraftModel):
        [spec] = drafter.model.kv_specs()
        features = None
        if drafter.is_head:
            shape = capacity.num_ranks, capacity.num_pages, capacity.page_size, drafter.model.config.hidden_size
            features = ArraySpec(shape, dtype, ("ranks", None, None, "features"))
        kv = pool(spec, capacity.num_pages)
        return Drafts(tokens, counts, None, by_slot(i32, max_tokens), kv, features)  # type: ignore[arg-type]
    tables = len(drafter.sizes), min(_MAX_ENTRIES, 2 ** (max_tokens - 1).bit_length())
    return Drafts(
        tokens,
        counts,
        NgramIndex(
            history=by_slot(i32, max_tokens),
            lengths=by_slot(i32),
            namespaces=by_slot(i32),
            own=by_slot(i32, *tables),
            shared=by_slot(np.dtype(np.uint32), *tables),
        ),
    )


def _undivided(empty: ArraySpec) -> ArraySpec:
    """Return the spec of an array without elements: XLA returns such an array undivided."""
    return dataclasses.replace(empty, shape=(1, *empty.shape[1:]), axes=(None,) * len(empty.axes))


def expert_tokens_spec(model: AnyModel, ranks: int, mixtures: int) -> ArraySpec | None:
    """Return how the tokens of a number of mixtures' experts are counted: by each rank, or once if ranks have different
    experts. None if there are no mixtures."""
    if not mixtures:
        return None
    experts = model.config.num_experts
    over_ranks = model.experts_over_ranks
    leading, axes = (1, (None, None, "experts_of_ranks")) if over_ranks else (ranks, ("ranks", None, "experts"))
    return ArraySpec((leading, mixtures, experts), np.dtype(np.uint32), axes)


def make_state(specs: DeviceState, shardings: DeviceState, kv_scales: Sequence[np.ndarray] = ()) -> DeviceState:
    """Allocate the state with the given shardings, filled with zeros.

    Pools of fp8 get these scales, `[2, layers, kv_heads]` for each KV group; ones without.
    """
    state = jax.tree.map(lambda s, where: jnp.zeros(s.shape, s.dtype, device=where), specs, shardings)

    def scaled(pool: PagedKV, spec: PagedKV, where: PagedKV, values: np.ndarray) -> PagedKV:
        if spec.scales is None:
            return pool
        shape, values = spec.scales.shape, values.astype(np.float32)
        scales = jax.make_array_from_callback(shape, where.scales, np.broadcast_to(values, shape).__getitem__)  # type: ignore[arg-type]
        return dataclasses.replace(pool, scales=scales)

    values = kv_scales or [np.ones(())] * len(state.kv)
    kv = tuple(map(scaled, state.kv, specs.kv, shardings.kv, values))
    drafts = state.drafts
    if drafts is not None and drafts.kv is not None:
        drafts = dataclasses.replace(drafts, kv=scaled(drafts.kv, specs.drafts.kv, shardings.drafts.kv, np.ones(())))  # type: ignore[union-attr, arg-type]
    return dataclasses.replace(state, kv=kv, drafts=drafts)


def one_rank(tree: Any) -> Any:
    """Remove the leading axis of ranks, which has length 1 inside `shard_map`."""
    return jax.tree.map(lambda x: x.reshape(x.shape[1:]), tree)


def all_ranks(tree: Any) -> Any:
    """Add the leading axis of ranks back."""
    return jax.tree.map(lambda x: x.reshape(1, *x.shape), tree)
