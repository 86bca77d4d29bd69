"""How kernels read the parameters of a row: from tables by slot, so that nothing is gathered for them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int


class SlotTable(NamedTuple):
    """Parameters by slot, and the slot of each row. A kernel has references in place of the arrays."""

    slots: Int[Array, " rows"]
    ints: Int[Array, "slots ints"]
    floats: Float[Array, "slots floats"]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the columns of `SlotTable.ints` and `SlotTable.floats`."""

    ints: tuple[str, ...]
    floats: tuple[str, ...]

    def read(self, table: SlotTable, row: Any, name: str) -> Any:
        """Return a parameter of a row, inside a kernel."""
        slot = table.slots[row]
        if name in self.ints:
            return table.ints[slot, self.ints.index(name)]
        return table.floats[slot, self.floats.index(name)]
