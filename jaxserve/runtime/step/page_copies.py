"""The two programs of the hierarchical cache, for each KV group: one reads some pages, one writes them back.

Like every program, both take the state and return it. A page is copied as one row over all layers and heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.batch import replace_pool
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.step.input_packing import InputPacking, PackedField
from jaxserve.runtime.step.program import ProgramKey, ProgramKind, RankFunction, Shapes, StepContext
from jaxserve.runtime.step.state import ArraySpec, DeviceState
from jaxserve.step_plan import Capacity
from pallas_kernels.paged_attention import read_pages, write_pages

PAGES_PER_COPY = 8
"""Pages that one call copies. A larger number would waste more reads when a single page is wanted."""

PageRows = tuple[jax.Array, ...]


def row_specs(state_specs: DeviceState, group: int) -> tuple[ArraySpec, ...]:
    """Return the rows of a call for each array of a group's pool.

    Each is `[ranks, pages, layers, kv_heads, page_size, lanes]`; the first group also has the features that a head
    that drafts needs, `[ranks, pages, page_size, dim]`.
    """
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


def _features(state: DeviceState) -> Any:
    """Return the features on the pages of the first group, or None if none are kept."""
    return None if state.drafts is None else state.drafts.features


def _make_read(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    """Return the program `(params, state, pages) -> (state, rows)`; rows of pages below 0 are undefined."""
    group = key.size

    def read(_: Any, state: DeviceState, pages: jax.Array) -> tuple[DeviceState, PageRows]:
        rows = read_pages(state.kv[group], pages)
        if group == 0 and (features := _features(state)) is not None:
            rows = (*rows, features.at[pages].get(mode="clip"))
        return state, rows

    return read


def _make_write(context: StepContext, capacity: Capacity, key: ProgramKey) -> RankFunction:
    """Return the program `(params, state, pages, *rows) -> (state, ())`, which skips pages below 0."""
    group = key.size

    def write(_: Any, state: DeviceState, pages: jax.Array, *rows: jax.Array) -> tuple[DeviceState, tuple[()]]:
        if group == 0 and (features := _features(state)) is not None:
            rows, copied = rows[:-1], rows[-1]
            at = jnp.where(pages < 0, features.shape[0], pages)
            features = features.at[at].set(copied, mode="drop")
            assert state.drafts is not None
            state = dataclasses.replace(state, drafts=dataclasses.replace(state.drafts, features=features))
        pool = write_pages(state.kv[group], pages, rows)
        return dataclasses.replace(state, kv=replace_pool(state.kv, group, pool)), ()

    return write


_PACKING = InputPacking([PackedField("pages", PAGES_PER_COPY, fill=-1)])


def read_key(group: int) -> ProgramKey:
    """Return the key of the program that reads pages of a KV group."""
    return ProgramKey("read_pages", group)


def write_key(group: int) -> ProgramKey:
    """Return the key of the program that writes pages of a KV group."""
    return ProgramKey("write_pages", group)


def _kind(name: str, **fields: Any) -> ProgramKind:
    return ProgramKind(
        name=name,
        keys=lambda capacity: [ProgramKey(name, group) for group in range(len(capacity.pages_by_group))],
        packing=lambda capacity, key: _PACKING,
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


def pack_pages(pages: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the packed input `[ranks, size]` for at most `PAGES_PER_COPY` pages of each rank."""
    return np.stack([_PACKING.pack({"pages": own}) for own in pages])
