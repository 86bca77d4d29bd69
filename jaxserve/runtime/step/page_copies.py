"""The two programs of the hierarchical cache, for each KV group: one reads some pages, one writes them back.

Like every program, both take the state and return it. A page is copied as one row over all layers and heads. The group
after the last one has the states of sequences, of which each is copied like a page.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, Shapes, StepContext
from jaxserve.runtime.step.state import ArraySpec, DeviceState
from jaxserve.step_plan import Capacity
from pallas_kernels.gated_delta import read_state, write_state
from pallas_kernels.paged_attention import read_pages, write_pages

PAGES_PER_COPY = 8
"""Pages that one call copies. A larger number would waste more reads when a single page is wanted."""


def pages_per_copy(capacity: Capacity, group: int) -> int:
    """Return the pages of a group that one call copies: a state is as large as thousands of tokens."""
    return PAGES_PER_COPY if group < len(capacity.pages_by_group) else 1


def num_groups(capacity: Capacity) -> int:
    """Return the number of groups that have pages, states included."""
    return len(capacity.pages_by_group) + (capacity.num_states > 0)


PageRows = tuple[jax.Array, ...]


def row_specs(state_specs: DeviceState, group: int) -> tuple[ArraySpec, ...]:
    """Return the rows of a call for each array of a group's pool.

    Each is `[ranks, pages, layers, kv_heads, page_size, lanes]`; the first group also has the features that a head
    that drafts needs, `[ranks, pages, page_size, dim]`. Those of states are `[ranks, 1, layers, heads, ...]`.
    """
    if group == len(state_specs.kv):
        assert state_specs.states is not None
        return tuple(map(_state_row, state_specs.states.pool.pools))  # type: ignore[arg-type]
    kv = state_specs.kv[group]
    heads, ranks = 2 if kv.page_major else 1, state_specs.last_tokens.shape[0]
    rows = [
        ArraySpec(
            (ranks, PAGES_PER_COPY, kv.num_layers, pool.shape[heads], *pool.shape[3:]),
            pool.dtype,
            ("ranks", None, None, pool.axes[heads], None, None),  # type: ignore[attr-defined]
        )
        for pool in kv.pools
    ]
    if group == 0 and (features := _features(state_specs)) is not None:
        shape = features.shape
        rows.append(dataclasses.replace(features, shape=(shape[0], PAGES_PER_COPY, *shape[2:])))
    return tuple(rows)


def _state_row(pool: ArraySpec) -> ArraySpec:
    """Return a row of an array `[ranks, layers, states, ...]` as `[ranks, 1, layers, ...]`."""
    ranks, layers, _, *rest = pool.shape
    return dataclasses.replace(pool, shape=(ranks, 1, layers, *rest), axes=(pool.axes[0], None, None, *pool.axes[3:]))


def _features(state: DeviceState) -> Any:
    """Return the features on the pages of the first group, or None if none are kept."""
    return None if state.drafts is None else state.drafts.features


def _make_read(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    """Return the program `(params, state, pages) -> (state, rows)`; rows of pages below 0 are undefined."""
    group = key.size

    def read(_: Any, state: DeviceState, pages: jax.Array) -> tuple[DeviceState, PageRows]:
        if group == len(state.kv):
            assert state.states is not None
            return state, tuple(row[None] for row in read_state(state.states.pool, pages[0]))
        rows = read_pages(state.kv[group], pages)
        if group == 0 and (features := _features(state)) is not None:
            rows = (*rows, features.at[pages].get(mode="clip"))
        return state, rows

    return read


def _make_write(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    """Return the program `(params, state, pages, *rows) -> (state, ())`, which skips pages below 0."""
    group = key.size

    def write(_: Any, state: DeviceState, pages: jax.Array, *rows: jax.Array) -> tuple[DeviceState, tuple[()]]:
        if group == len(state.kv):
            assert state.states is not None
            states = write_state(state.states.pool, pages[0], tuple(row[0] for row in rows))
            return dataclasses.replace(state, states=dataclasses.replace(state.states, pool=states)), ()
        if group == 0 and (features := _features(state)) is not None:
            rows, copied = rows[:-1], rows[-1]
            at = jnp.where(pages < 0, features.shape[0], pages)
            features = features.at[at].set(copied, mode="drop")
            assert state.drafts is not None
            state = dataclasses.replace(state, drafts=dataclasses.replace(state.drafts, features=features))
        pool = write_pages(state.kv[group], pages, rows)
        return dataclasses.replace(state, kv=(*state.kv[:group], pool, *state.kv[group + 1 :])), ()

    return write


@functools.cache
def _packing(pages: int) -> InputPacking:
    return InputPacking([PackedField("pages", pages, fill=-1)])


def read_key(group: int) -> ProgramKey:
    """Return the key of the program that reads pages of a KV group."""
    return ProgramKey("read_pages", group)


def write_key(group: int) -> ProgramKey:
    """Return the key of the program that writes pages of a KV group."""
    return ProgramKey("write_pages", group)


def _kind(name: str, **fields: Any) -> ProgramKind:
    return ProgramKind(
        name=name,
        keys=lambda capacity: [ProgramKey(name, group) for group in range(num_groups(capacity))],
        packing=lambda capacity, key: _packing(pages_per_copy(capacity, key.size)),
        wants=lambda config: config.enable_hierarchical_cache,
        takes_weights=False,
        **fields,
    )


def _rows(shapes: Shapes, key: ProgramKey) -> tuple[ArraySpec, ...]:
    return row_specs(shapes.state, key.size)


READ_PAGES = _kind(
    "read_pages",
    make=_make_read,
    output=lambda shapes, key: partitions(_rows(shapes, key)),
    stays_divided=True,
)
WRITE_PAGES = _kind("write_pages", make=_make_write, rows=_rows)


def pack_pages(pages: Sequence[Sequence[int]], most: int) -> np.ndarray:
    """Return the packed input `[ranks, size]` of a call that copies up to `most` pages of each rank."""
    return np.stack([_packing(most).pack({"pages": own}) for own in pages])
