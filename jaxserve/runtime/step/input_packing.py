"""Packs the whole input of a step into one int32 vector per rank, so that it takes one transfer.

One list of fields defines the layout both for packing on the host (numpy) and for unpacking in a program (slices), so
the two can't disagree. Floats are packed as their bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class PackedField:
    """A field of `length` values, or a scalar if `length` is None. Values that aren't given hold `fill`."""

    name: str
    length: int | None = None
    fill: int = 0
    is_float: bool = False

    @property
    def size(self) -> int:
        """The number of int32 words it takes."""
        return 1 if self.length is None else self.length


class InputPacking:
    """Fields laid end to end in a vector of `size` words."""

    def __init__(self, fields: Sequence[PackedField]) -> None:
        self.fields = tuple(fields)
        self.offsets: dict[str, int] = {}
        at = 0
        for field in self.fields:
            self.offsets[field.name] = at
            at += field.size
        self.size = at
        self._empty = np.concatenate([np.full(f.size, f.fill, np.int32) for f in self.fields])

    def pack(self, values: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Return a new vector with the given values at the start of each field, and the rest filled."""
        vector = self._empty.copy()
        floats = vector.view(np.float32)
        for field in self.fields:
            given = values.get(field.name, ())
            if len(given):
                assert len(given) <= field.size, (field, len(given))
                at = self.offsets[field.name]
                (floats if field.is_float else vector)[at : at + len(given)] = given
        return vector

    def unpack(self, vector: jax.Array) -> dict[str, jax.Array]:
        """Return the fields by name: a vector each, or a scalar if the field has no length."""
        out = {}
        for field in self.fields:
            at = self.offsets[field.name]
            part = vector[at] if field.length is None else vector[at : at + field.length]
            out[field.name] = lax.bitcast_convert_type(part, jnp.float32) if field.is_float else part
        return out
