"""The tile registers of CPUs with Intel's AMX: eight matrices, and an instruction that multiplies two and adds a third.

Follows Intel's manual (Software Developer's Manual, volume 2: LDTILECFG, TDPBF16PS). A process must ask Linux for these
registers once, see `permitted`.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import I8, I16, I64

ROWS, ROW_BYTES = 16, 64
"""The most rows of a register, and the bytes of a row."""
TILE_BYTES = ROWS * ROW_BYTES
FEATURES = frozenset({"amx-tile", "amx-bf16"})
"""LLVM's names of the features that `TileRegisters` needs, besides AVX-512."""

_NUM_REGISTERS = 8
_CONFIG_BYTES, _PALETTE_AT, _ROW_BYTES_AT, _ROWS_AT = 64, 0, 16, 48
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


class TileRegisters:
    """The instructions of one function. A thread must `configure` its registers first, and `release` them last.

    Registers of `LEFT` and `SUMS` have `rows` rows, 1 to `ROWS`; those of `RIGHT` have `ROWS`. A row of `SUMS` holds 16
    float32 sums, one of `LEFT` 32 bfloat16 inputs, one of `RIGHT` two neighbouring inputs of each of 16 outputs.
    """

    SUMS, LEFT, RIGHT = range(4), 4, range(5, 8)

    def __init__(self, function: Function, rows: Value) -> None:
        self._function, self._rows = function, rows

    def configure(self) -> None:
        """Set the shapes of this thread's registers."""
        f = self._function
        config = f.stack(_CONFIG_BYTES)
        f.store(f.constant(I8.times(_CONFIG_BYTES), 0), config)
        f.store(f.constant(I8, 1), config, _PALETTE_AT)
        f.store(f.constant(I16.times(_NUM_REGISTERS), ROW_BYTES), config, _ROW_BYTES_AT)
        f.store(f.constant(I8.times(_NUM_REGISTERS), ROWS), config, _ROWS_AT)
        for number in (*self.SUMS, self.LEFT):
            f.store(f.convert("trunc", self._rows, I8), config, _ROWS_AT + number)
        f.call("llvm.x86.ldtilecfg", None, config)

    def release(self) -> None:
        """Give the registers back: a thread that holds them is slower to switch."""
        self._function.call("llvm.x86.tilerelease", None)

    def clear(self, number: int) -> None:
        """Set a register to zero."""
        self._function.call("llvm.x86.tilezero", None, self._register(number))

    def load(self, number: int, pointer: Value, row_bytes: Value | int = ROW_BYTES) -> None:
        """Load a register; its rows begin `row_bytes` apart."""
        self._move("llvm.x86.tileloadd64", number, pointer, row_bytes)

    def store(self, number: int, pointer: Value, row_bytes: Value | int = ROW_BYTES) -> None:
        """Store a register; its rows begin `row_bytes` apart."""
        self._move("llvm.x86.tilestored64", number, pointer, row_bytes)

    def add_products(self, sums: int, right: int, left: int = LEFT) -> None:
        """Add the product of two registers to a third, which has as many rows as `left`; `right` is one of `RIGHT`.

        Products of first and of second neighbours are summed each in order, from zero, then added to each other and
        to the sum. Numbers below the normal range count as zero.
        """
        self._function.call("llvm.x86.tdpbf16ps", None, *map(self._register, (sums, left, right)))

    def _move(self, instruction: str, number: int, pointer: Value, row_bytes: Value | int) -> None:
        f = self._function
        stride = row_bytes if isinstance(row_bytes, Value) else f.constant(I64, row_bytes)
        f.call(instruction, None, self._register(number), pointer, stride)

    def _register(self, number: int) -> Value:
        return self._function.constant(I8, number)


@functools.cache
def permitted() -> bool:
    """Return whether this process may use the registers: asks Linux to save them when it switches threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
