"""The parts that decode and prefill of the CPU's kernel share: facts of a call, operands, page lookups and rows."""

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
"""Size of a task, which describes a work item."""


@dataclasses.dataclass(frozen=True)
class CpuHeads:
    """The static facts of heads: `group` query heads to a KV head. Dtypes are numpy's names."""

    group: int
    head_dim: int
    value_dim: int | None
    dtype: str
    kv_dtype: str
    scale: float
    soft_cap: float | None

    @property
    def value_width(self) -> int:
        """Numbers of a value, and of a head's output."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def vectors(self) -> int:
        """Vectors of a value."""
        return self.value_width // LANES

    @property
    def q_bytes(self) -> int:
        """Size of one number of the queries."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def kv_bytes(self) -> int:
        """Size of one number of keys and values."""
        return 2 if self.kv_dtype == "bfloat16" else 4


@dataclasses.dataclass(frozen=True)
class CpuAttention(CpuHeads):
    """The static facts of a call, which `writes` new tokens or only reads.

    With `max_queries`, which implies `decode_only`, decode's code computes rows of up to this many queries. Rows before
    the chunks are left out with `chunks_only`. With `value_dim` the pool has latent rows, whose code is the same for
    all rows of the batch.
    """

    page_size: int
    window: int | None
    sinks: bool
    decode_only: bool
    max_queries: int | None
    writes: bool
    chunks_only: bool

    @property
    def name(self) -> str:
        """A name that is unique for these facts."""
        kind = "decode" if self.decode_only else "mixed" if self.value_dim is None else "latent"
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]
        return f"llvm_paged_attention_{kind}_{self.group}x{self.head_dim}_{digest}"

    @property
    def num_pools(self) -> int:
        """Arrays that have pages."""
        return 2 if self.value_dim is None else 1

    @property
    def kv_row_bytes(self) -> int:
        """Size of one token of one head in the pool."""
        return self.head_dim * self.kv_bytes


class SharedOperands(NamedTuple):
    """The pointers and integers that all work items share.

    `values` are `keys` if the pool has latent rows. `entries` is the number of the pool's pages of one head,
    `first_entry` the layer's first. `tasks` describes the items. `counters` and `partials` are the chunk counts and
    states that items of one row exchange. A chunk of a decode is `head_shares` items, of equal parts of the KV heads.
    """

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
    """Load an int32 of an array."""
    return f.convert("sext", f.load(I32, pointer, index * 4), I64)


def token_offset(
    f: Function, shared: SharedOperands, facts: CpuAttention, row: Value, head: Value, position: Value
) -> Value:
    """Return the offset in bytes of a row's token in the pool."""
    page = int_at(f, shared.page_table, row * shared.max_pages + position // facts.page_size)
    entry = head * shared.entries + shared.first_entry + page
    return (entry * facts.page_size + position % facts.page_size) * facts.kv_row_bytes


def load_row(f: Function, pointer: Value, dtype: str, count: int) -> list[Value]:
    """Load `count` numbers as float32."""
    if dtype == "bfloat16":
        return [maths.from_bf16(f, f.load(HALVES, pointer, 32 * i)) for i in range(count // LANES)]
    return [f.load(VECTOR, pointer, 64 * i) for i in range(count // LANES)]


def store_row(f: Function, row: list[Value], pointer: Value, dtype: str) -> None:
    """Store a row of float32 as `dtype`."""
    for i, numbers in enumerate(row):
        if dtype == "bfloat16":
            f.store(maths.to_bf16(f, numbers), pointer, 32 * i)
        else:
            f.store(numbers, pointer, 64 * i)


def capped(f: Function, logits: Value, facts: CpuHeads) -> Value:
    """Scale and cap products of queries and keys."""
    logits = logits * facts.scale
    if facts.soft_cap is None:
        return logits
    return maths.tanh(f, logits * (1.0 / facts.soft_cap)) * facts.soft_cap


def positions(f: Function, first: Value) -> Value:
    """Return the positions of a vector's tokens, int32."""
    lanes = f.constant(WORDS, range(LANES))
    return f.broadcast(f.convert("trunc", first, I32), LANES) + lanes


def splat(f: Function, value: Value) -> Value:
    """Return a position in every lane, int32."""
    return f.broadcast(f.convert("trunc", value, I32), LANES)


def zero(f: Function) -> Value:
    """Return a vector of zeros."""
    return f.constant(VECTOR, 0.0)
