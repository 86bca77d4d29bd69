"""One int32 vector per rank carries a whole step: one transfer. A table of fields says how it is packed.

The same table packs on the host (numpy) and unpacks in a program (slices), so that the two can't disagree. Floats
travel as their bits.
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
class Field:
    """`length` values under a name; without a length a single one, a scalar. `fill` is what unset ones hold."""

    name: str
    length: int | None = None
    fill: int = 0
    is_float: bool = False

    @property
    def size(self) -> int:
        """Words it takes."""
        return 1 if self.length is None else self.length


class Packing:
    """A sequence of fields laid end to end. Hashable by its fields."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self.offsets: dict[str, int] = {}
        at = 0
        for field in self.fields:
            self.offsets[field.name] = at
            at += field.size
        self.size = at
        self._empty = np.concatenate([np.full(f.size, f.fill, np.int32) for f in self.fields])

    def pack(self, values: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """A fresh vector with the given values at the front of each field, the rest filled."""
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
        """The fields by name, each as a vector, or as a scalar where it was declared without a length."""
        out = {}
        for field in self.fields:
            at = self.offsets[field.name]
            part = vector[at] if field.length is None else vector[at : at + field.length]
            out[field.name] = lax.bitcast_convert_type(part, jnp.float32) if field.is_float else part
        return out
