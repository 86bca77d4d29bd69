"""What both halves of the CPU's kernel stand on: the facts of a call, what its items share, and rows of numbers.

A row of float32 is in memory as it is. Of a row of bfloat16 each 32 numbers are read as 16 words, so that a shift and
a mask make float32 of them: the 16 even ones, then the 16 odd ones. Whatever meets such rows, queries and sums, is kept
in their order.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple

from pallas_kernels.cpu import maths
from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.types import F32, I16, I32, I64

LANES = 16
VECTOR, WORDS, HALVES = F32.times(LANES), I32.times(LANES), I16.times(LANES)
MASKED = -1e30

TASK_BYTES = 32
"""Of what says which part of the work an item is."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The static facts of a call; types by numpy's names."""

    group: int
    head_dim: int
    page_size: int
    dtype: str
    kv_dtype: str
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool
    decode_only: bool

    @property
    def name(self) -> str:
        """One for each set of facts."""
        kind = "decode" if self.decode_only else "mixed"
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]
        return f"llvm_paged_attention_{kind}_{self.group}x{self.head_dim}_{digest}"

    @property
    def vectors(self) -> int:
        """Registers that a head fills."""
        return self.head_dim // LANES

    @property
    def paired(self) -> bool:
        """Whether rows are in the order of bfloat16."""
        return self.kv_dtype == "bfloat16"

    @property
    def q_bytes(self) -> int:
        """Of one number."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def kv_bytes(self) -> int:
        """Likewise."""
        return 2 if self.kv_dtype == "bfloat16" else 4

    @property
    def kv_row_bytes(self) -> int:
        """Of one token of one head."""
        return self.head_dim * self.kv_bytes


class Work(NamedTuple):
    """What items share. `entries` is the pool's pages of one head, `first_entry` the layer's first; `tasks` describes
    the items, `counters` and `partials` are what those of one row need of each other. Decodes of a chunk are one item
    for each of `head_shares` equal parts of the KV heads."""

    q: Value
    out: Value
    keys: Value
    values: Value
    page_table: Value
    query_starts: Value
    kv_lens: Value
    sinks: Value
    tasks: Value
    counters: Value
    partials: Value
    num_decodes: Value
    kv_heads: Value
    head_shares: Value
    entries: Value
    first_entry: Value
    max_pages: Value


def int_at(f: Function, pointer: Value, index: Value) -> Value:
    """An int32 of an array."""
    return f.convert("sext", f.load(I32, pointer, index * 4), I64)


def token_offset(f: Function, work: Work, facts: Attention, row: Value, head: Value, position: Value) -> Value:
    """Bytes from the pool's begin to a token that the row holds."""
    page = int_at(f, work.page_table, row * work.max_pages + position // facts.page_size)
    entry = head * work.entries + work.first_entry + page
    return (entry * facts.page_size + position % facts.page_size) * facts.kv_row_bytes


def load_row(f: Function, pointer: Value, dtype: str, count: int, *, paired: bool) -> list[Value]:
    """`count` numbers in float32; where `paired`, in the order of bfloat16."""
    out: list[Value] = []
    while count >= 2 * LANES and paired:
        if dtype == "bfloat16":
            out += maths.pairs_from_bf16(f, f.load(WORDS, pointer, 32 * len(out)))
        else:
            low, high = (f.load(VECTOR, pointer, 64 * (len(out) + i)) for i in range(2))
            out += [f.shuffle(low, high, range(parity, 2 * LANES, 2)) for parity in range(2)]
        count -= 2 * LANES
    for _ in range(count // LANES):
        if dtype == "bfloat16":
            out.append(maths.from_bf16(f, f.load(HALVES, pointer, 32 * len(out))))
        else:
            out.append(f.load(VECTOR, pointer, 64 * len(out)))
    return out


def store_row(f: Function, row: list[Value], pointer: Value, dtype: str, *, paired: bool) -> None:
    """The reverse of `load_row`."""
    at = 0
    while len(row) - at >= 2 and paired:
        even, odd = row[at : at + 2]
        if dtype == "bfloat16":
            f.store(maths.pairs_to_bf16(f, even, odd), pointer, 32 * at)
        else:
            for i in range(2):
                lanes = [lane // 2 + LANES * (lane % 2) for lane in range(LANES * i, LANES * (i + 1))]
                f.store(f.shuffle(even, odd, lanes), pointer, 64 * (at + i))
        at += 2
    for i in range(at, len(row)):
        if dtype == "bfloat16":
            f.store(maths.to_bf16(f, row[i]), pointer, 32 * i)
        else:
            f.store(row[i], pointer, 64 * i)


def capped(f: Function, logits: Value, facts: Attention) -> Value:
    """Products of queries and keys as logits."""
    logits = logits * facts.scale
    if facts.soft_cap is None:
        return logits
    return maths.tanh(f, logits * (1.0 / facts.soft_cap)) * facts.soft_cap


def positions(f: Function, first: Value) -> Value:
    """Those of a register's tokens, int32."""
    lanes = f.constant(WORDS, range(LANES))
    return f.spread(f.convert("trunc", first, I32), LANES) + lanes


def splat(f: Function, value: Value) -> Value:
    """A position in every lane."""
    return f.spread(f.convert("trunc", value, I32), LANES)


def zero(f: Function) -> Value:
    """A register of zeros."""
    return f.constant(VECTOR, 0.0)
