"""The parameters that a row is sampled with: the columns of the tables that hold them by slot.

A column has the name of a request's option, in capitals. Tables may have more columns after these.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

# Bits of the 16-bit counts of tokens: the sign bit is set for tokens of the prompt, the others count the output.
SEEN_IN_PROMPT = -(2**15)
COUNT_MASK = 2**15 - 1


class IntColumn(enum.IntEnum):
    """The integers. Stop ids may not be drawn while a sequence is shorter than `MIN_LEN`."""

    TOP_K = 0
    SEED_LOW = 1
    SEED_HIGH = 2
    SAMPLE = 3
    MIN_LEN = 4
    LOGPROBS = 5


class FloatColumn(enum.IntEnum):
    """The floats."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    FREQUENCY_PENALTY = 4
    PRESENCE_PENALTY = 5


class SlotTable(NamedTuple):
    """Parameters by slot, and the slot of each row, so that nothing is gathered. A kernel gets references to these."""

    slots: Int[Array, " rows"]
    ints: Int[Array, "slots ints"]
    floats: Float[Array, "slots floats"]

    def read(self, row: Any, column: IntColumn | FloatColumn) -> Any:
        """Return a parameter of a row, inside a kernel."""
        slot = self.slots[row]
        return self.ints[slot, column] if isinstance(column, IntColumn) else self.floats[slot, column]


class Edits(NamedTuple):
    """The arrays, by slot, that edit logits besides the parameters of `SlotTable`; `first` is this shard's first id.

    The bits of `counts` in `COUNT_MASK` say how often a token was output; tokens of the prompt have another bit set.
    `pending`, by row, has tokens that come before the row's position but aren't in `counts` yet: each is one more
    output, on whichever shard has it. Unused ids are -1, and those of the bias come last.
    """

    counts: Int[Array, "slots vocab_shard"]
    stop_ids: Int[Array, "slots stop_ids"]
    bias_ids: Int[Array, "slots bias"]
    bias_values: Float[Array, "slots bias"]
    first: Int[Array, " 1"]
    pending: Int[Array, "rows most"] | None = None


class DrawParameters(NamedTuple):
    """The temperature of each row, and the parameters that truncate its distribution."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]

    @classmethod
    def of_rows(cls, ints: Int[Array, "rows ints"], floats: Float[Array, "rows floats"]) -> DrawParameters:
        """Return the columns of tables by row."""
        return cls(
            temperature=floats[:, FloatColumn.TEMPERATURE],
            top_k=ints[:, IntColumn.TOP_K],
            top_p=floats[:, FloatColumn.TOP_P],
            min_p=floats[:, FloatColumn.MIN_P],
        )
