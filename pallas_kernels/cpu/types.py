"""The types of LLVM IR that kernels use, and their constants."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

Number = int | float


@dataclasses.dataclass(frozen=True)
class Type:
    """A number or a pointer; a vector of `lanes` numbers if `lanes` isn't 0."""

    name: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.name}>" if self.lanes else self.name

    @property
    def is_float(self) -> bool:
        """Whether its numbers are floating point."""
        return self.name in ("float", "bfloat", "half")

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        bits = {"float": 32, "bfloat": 16, "half": 16, "ptr": 64}.get(self.name) or int(self.name[1:])
        return max(self.lanes, 1) * bits // 8

    @property
    def alignment(self) -> int:
        """Alignment of one number. Vectors have the same, as rows of a tensor may start anywhere."""
        return Type(self.name).nbytes

    def times(self, lanes: int) -> Type:
        """Return the type of a vector of `lanes` such numbers."""
        return Type(self.name, lanes)

    def literal(self, number: Number | Sequence[Number]) -> str:
        """Return a constant in LLVM's syntax: one number for all lanes, or one for each."""
        if not self.lanes:
            assert not isinstance(number, Sequence)
            return self._number(number)
        numbers = number if isinstance(number, Sequence) else [number] * self.lanes
        lane = Type(self.name)
        return "<" + ", ".join(f"{lane} {lane._number(one)}" for one in numbers) + ">"

    def _number(self, number: Number) -> str:
        if self.name == "ptr":
            assert number == 0
            return "null"
        if not self.is_float:
            return str(int(number))
        assert self.name == "float", self  # others come from memory
        rounded = struct.unpack("<f", struct.pack("<f", number))[0]
        return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


F32, BF16, F16 = Type("float"), Type("bfloat"), Type("half")
I1, I8, I16, I32, I64 = (Type(f"i{bits}") for bits in (1, 8, 16, 32, 64))
PTR = Type("ptr")
