"""A block of a text's keys and values, laid out for the code that paged attention has for products with queries."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple

from pallas_kernels.cpu.emit import Function, Value
from pallas_kernels.cpu.tile_registers import TileRegisters
from pallas_kernels.cpu.types import I64
from pallas_kernels.paged_attention.cpu.blocks import (
    BLOCK,
    has_tiles,
    is_exact,
    lay_out_group,
    most_sums,
    query_bytes,
)
from pallas_kernels.paged_attention.cpu.tiles import HALVES, LANES, WORDS, CpuHeads, load_row


@dataclasses.dataclass(frozen=True)
class CpuPacked(CpuHeads):
    """The static facts of a call."""

    reach: int | None
    has_bias: bool

    @property
    def name(self) -> str:
        """A name that is unique for these facts."""
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]
        return f"llvm_packed_attention_{self.group}x{self.head_dim}_{digest}"


class PackedOperands(NamedTuple):
    """The pointers and integers that all work items share. `bias` has `distances` numbers for each query head."""

    q: Value
    keys: Value
    values: Value
    out: Value
    starts: Value
    bias: Value
    tasks: Value
    kv_heads: Value
    distances: Value


class PackedBlock(NamedTuple):
    """Memory for a block of one KV head of a text: see `LaidOut`.

    `keys_at` and `values_at` point to the text's first token; the next one is `token_bytes` further.
    """

    facts: CpuPacked
    keys: Value
    values: Value
    logits: Value
    weights: Value
    exact: bool
    tiles: TileRegisters | None
    sums: int
    keys_at: Value
    values_at: Value
    token_bytes: Value
    length: Value


def make_block(
    f: Function,
    operands: PackedOperands,
    facts: CpuPacked,
    head: Value,
    start: Value,
    stop: Value,
    features: frozenset[str],
    rows: int,
) -> PackedBlock:
    """Allocate memory on the stack of `f` for a block of the text of tokens `start` to `stop`.

    `rows` rows of queries are computed together. If the CPU has tile registers, set their shapes; the caller must
    release them.
    """
    exact = is_exact(facts, features)
    size = 2 if exact else 4
    keys, values = (f.stack(BLOCK * facts.head_dim * size) for _ in range(2))
    logits, weights = f.stack(rows * BLOCK * 4), f.stack(rows * BLOCK * size)
    tiles = TileRegisters(f, f.constant(I64, rows)) if has_tiles(facts, features) else None
    if tiles is not None:
        tiles.configure()
    head_bytes = facts.head_dim * facts.kv_bytes
    token_bytes = operands.kv_heads * head_bytes
    own = start * token_bytes + head * head_bytes
    return PackedBlock(
        facts=facts,
        keys=keys,
        values=values,
        logits=logits,
        weights=weights,
        exact=exact,
        tiles=tiles,
        sums=most_sums(features),
        keys_at=f.at(operands.keys, own),
        values_at=f.at(operands.values, own),
        token_bytes=token_bytes,
        length=stop - start,
    )


def lay_out(f: Function, block: PackedBlock, at: Value, end: Value) -> None:
    """Lay out the block at `at`, of which queries see tokens up to `end`.

    Past the text, its last token is repeated up to a whole vector, and zeros fill the block.
    """
    facts = block.facts

    def token(pointer: Value, i: Value) -> Value:
        return f.at(pointer, f.minimum(at + i, block.length - 1) * block.token_bytes)

    def group(i: Value) -> None:
        tokens = [token(block.keys_at, i * LANES + lane) for lane in range(LANES)]
        lay_out_group(f, tokens, f.at(block.keys, i * 64), facts, block.exact)

    def pair(k: Value) -> None:
        first, second = (token(block.values_at, k * 2 + i) for i in range(2))
        for i in range(facts.vectors):
            halves = f.load(HALVES, first, 32 * i), f.load(HALVES, second, 32 * i)
            words = f.shuffle(halves[0], halves[1], [lane + side for lane in range(LANES) for side in (0, LANES)])
            f.store(words, block.values, k * (facts.head_dim * 4) + 64 * i)

    def one(k: Value) -> None:
        for i, column in enumerate(load_row(f, token(block.values_at, k), facts.kv_dtype, facts.head_dim)):
            f.store(column, block.values, k * (facts.head_dim * 4) + 64 * i)

    def clear_group(i: Value) -> None:
        for word in range(query_bytes(block) // 4):
            f.store(f.constant(WORDS, 0), block.keys, i * 64 + word * (BLOCK * 4))

    def clear_pair(k: Value) -> None:
        for i in range(facts.vectors):
            f.store(f.constant(WORDS, 0), block.values, k * (facts.head_dim * 4) + 64 * i)

    groups, pairs = (end - at + (LANES - 1)) // LANES, (end - at + 1) // 2
    f.loop(groups, group)
    f.loop(BLOCK // LANES, clear_group, start=groups)
    f.loop(pairs if block.exact else end - at, pair if block.exact else one)
    if block.tiles is not None:  # which multiply all tokens of a block
        f.loop(BLOCK // 2, clear_pair, start=pairs)
