"""What the parts of the CPU's kernel share: facts of a call, its operands, and a row of the batch for one key head."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I1, I8, I16, I32, I64

LANES = 16
VECTOR, HALVES = F32.times(LANES), I16.times(LANES)
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class CpuDelta:
    """The static facts of a call. Dtypes are numpy's names."""

    group: int
    key_dim: int
    value_dim: int
    taps: int
    ring: int
    recent: int
    dtype: str
    gates_dtype: str
    weights_dtype: str

    @property
    def name(self) -> str:
        """A name that is unique for these facts."""
        return "llvm_gated_delta_" + "_".join(map(str, dataclasses.astuple(self)))

    @property
    def width(self) -> int:
        """The inputs of the convolution for a key head."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def row_bytes(self) -> int:
        """Size of the inputs of a token for a key head."""
        return self.width * NUMBER_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Size of the state of a value head."""
        return self.key_dim * self.value_dim * 4


class DeltaOperands(NamedTuple):
    """The pointers and integers that all work items share. Pointers to states are those of the call's layer.

    An item has up to `item_panels` panels of values of a key head. `counters` has the items that are done, by row and
    key head.
    """

    products: Value
    gates: Value
    conv: Value
    rate: Value
    bias: Value
    out: Value
    recurrent: Value
    tails: Value
    keys: Value
    deltas: Value
    decays: Value
    inputs: Value
    slots: Value
    query_starts: Value
    lens: Value
    folded: Value
    certain: Value
    sources: Value
    targets: Value
    snapshots: Value
    snapshot_lens: Value
    num_seqs: Value
    key_heads: Value
    item_panels: Value
    counters: Value


class HeadOfRow(NamedTuple):
    """A row of the batch for one key head: where its arrays begin, and its positions.

    The source has the state up to `folded`, the slot has tokens up to `begin`, the step those up to `end`. The target
    gets the state at `border`. `snapshot` is -1 if there is none.
    """

    facts: CpuDelta
    operands: DeltaOperands
    head: Value
    begin: Value
    end: Value
    folded: Value
    border: Value
    first_token: Value
    source: Value
    target: Value
    snapshot: Value
    snapshot_len: Value
    keys: Value
    deltas: Value
    decays: Value
    inputs: Value

    def state(self, f: Function, row: Value) -> Value:
        """Return where a row of the pool has the states of this head's group."""
        offset = (row * self.operands.key_heads + self.head) * (self.facts.group * self.facts.state_bytes)
        return f.at(self.operands.recurrent, offset)

    def tail(self, f: Function, row: Value) -> Value:
        """Return where a row of the pool has the inputs before its border."""
        offset = (row * self.operands.key_heads + self.head) * ((self.facts.taps - 1) * self.facts.row_bytes)
        return f.at(self.operands.tails, offset)

    def product(self, f: Function, position: Value) -> Value:
        """Return where the products of a new token are."""
        token = self.first_token + position - self.begin
        return f.at(self.operands.products, (token * self.operands.key_heads + self.head) * self.facts.row_bytes)


def head_of_row(f: Function, facts: CpuDelta, operands: DeltaOperands, row: Value, head: Value) -> HeadOfRow:
    """Load the numbers of a row."""
    first_token, past = (int_at(f, operands.query_starts, row + i) for i in range(2))
    begin, folded, certain = (int_at(f, of, row) for of in (operands.lens, operands.folded, operands.certain))
    slot = int_at(f, operands.slots, row) * operands.key_heads + head
    group_bytes = facts.group * facts.ring * 4
    return HeadOfRow(
        facts=facts,
        operands=operands,
        head=head,
        begin=begin,
        end=begin + past - first_token,
        folded=folded,
        border=f.maximum(certain & -LANES, folded),
        first_token=first_token,
        source=int_at(f, operands.sources, row),
        target=int_at(f, operands.targets, row),
        snapshot=int_at(f, operands.snapshots, row),
        snapshot_len=int_at(f, operands.snapshot_lens, row),
        keys=f.at(operands.keys, slot * (facts.ring * facts.key_dim * 4)),
        deltas=f.at(operands.deltas, slot * (group_bytes * facts.value_dim)),
        decays=f.at(operands.decays, slot * group_bytes),
        inputs=f.at(operands.inputs, slot * (facts.recent * facts.row_bytes)),
    )


def int_at(f: Function, pointer: Value, index: Value) -> Value:
    """Load an int32 of an array."""
    return f.convert("sext", f.load(I32, pointer, index * 4), I64)


def load_numbers(f: Function, pointer: Value, dtype: str) -> Value:
    """Load 16 numbers as float32."""
    return f.load(VECTOR, pointer) if dtype == "float32" else maths.from_bf16(f, f.load(HALVES, pointer))


def load_number(f: Function, pointer: Value, dtype: str) -> Value:
    """Load a number as float32."""
    if dtype == "float32":
        return f.load(F32, pointer)
    return f.convert("bitcast", f.convert("zext", f.load(I16, pointer), I32) << 16, F32)


def splat(f: Function, pointer: Value, offset: Value | int = 0) -> Value:
    """Load a float32 into every lane."""
    return f.broadcast(f.load(F32, pointer, offset), LANES)


def to_bf16(f: Function, numbers: Value, features: frozenset[str]) -> Value:
    """Return the bits of the nearest bfloat16."""
    if "avx512bf16" in features:
        return f.convert("bitcast", f.to_bf16(numbers), HALVES)
    return maths.to_bf16(f, numbers)


def copy_bytes(f: Function, to: Value, source: Value, size: int) -> None:
    """Copy memory that doesn't overlap."""
    f.call("llvm.memcpy.p0.p0.i64", None, to, source, f.constant(I64, size), f.constant(I1, 0))


def clear_bytes(f: Function, to: Value, size: Value | int) -> None:
    """Set memory to zero."""
    size = size if isinstance(size, Value) else f.constant(I64, size)
    f.call("llvm.memset.p0.i64", None, to, f.constant(I8, 0), size, f.constant(I1, 0))
