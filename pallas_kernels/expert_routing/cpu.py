"""Groups pairs by expert, and adds the outputs of experts, on a CPU: XLA takes long to compile its sort and gather."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.cpu import call
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import F32, I32, I64, PTR
from pallas_kernels.grouped_matmul.groups import Groups

_LANES = F32.times(16)
# An item with this many numbers is worth starting a thread
_ITEM_NUMBERS = 1 << 14


def group_by_expert(ids: Int32[Array, "tokens choices"], num_experts: int) -> Groups:
    """See `api.group_by_expert`."""
    shapes = (num_experts + 1,), (ids.size,), ids.shape
    return Groups(*call(GroupByExpert(), [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes], ids))


def add_chosen(
    out: Float32[Array, "rows dim"], places: Int32[Array, "tokens choices"], weights: Float32[Array, "tokens choices"]
) -> Float32[Array, "tokens dim"]:
    """See `api.add_chosen`. `dim` must be a multiple of 16."""
    shape = jax.ShapeDtypeStruct((len(places), out.shape[1]), jnp.float32)
    summed: Array = call(AddChosen(), shape, out, places, weights)
    return summed


@dataclasses.dataclass(frozen=True)
class GroupByExpert:
    """The kernel: a counting sort. Results are as in `Groups`."""

    @property
    def name(self) -> str:
        return "llvm_group_by_expert"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 1, 3, _group)


def _group(call: Call) -> None:
    f, (ids,) = call.function, call.arguments
    starts, tokens, places = call.results
    choices, pairs = ids.dim(1), ids.dim(0) * ids.dim(1)
    experts = starts.dim(0) - 1
    none = f.constant(I32, 0)
    # A cursor is the next row of an expert; one more counts pairs without an expert
    cursors = f.call("malloc", PTR, (experts + 1) * 4)

    def read(array: Value, i: Value) -> Value:
        return f.load(I32, array, i * 4)

    def expert_of(pair: Value) -> Value:
        expert = f.convert("sext", read(ids.data, pair), I64)
        return f.select(expert < 0, experts, f.minimum(expert, experts))

    def count(pair: Value) -> None:
        at = expert_of(pair) * 4
        f.store(f.load(I32, cursors, at) + 1, cursors, at)

    def start(expert: Value, before: Value) -> Value:
        counted = read(cursors, expert)
        f.store(before, starts.data, expert * 4)
        f.store(before, cursors, expert * 4)
        return before + counted

    def place(pair: Value) -> None:
        expert = expert_of(pair)
        row = read(cursors, expert)

        def take() -> None:
            f.store(row + 1, cursors, expert * 4)
            token = f.convert("trunc", pair // choices, I32)
            f.store(token, tokens.data, f.convert("sext", row, I64) * 4)
            f.store(row, places.data, pair * 4)

        rows = f.convert("trunc", pairs, I32)
        f.when(expert < experts, take, lambda: f.store(rows, places.data, pair * 4))

    f.loop(experts + 1, lambda i: f.store(none, cursors, i * 4))
    f.loop(pairs, count)
    [end] = f.loop(experts, start, none)
    f.store(end, starts.data, experts * 4)
    f.loop(pairs, place)
    f.loop(pairs, lambda row: f.store(none, tokens.data, row * 4), start=f.convert("sext", end, I64))
    f.call("free", None, cursors)


@dataclasses.dataclass(frozen=True)
class AddChosen:
    """The kernel: threads share tokens."""

    @property
    def name(self) -> str:
        return "llvm_add_chosen"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 3, 1, _add)


def _add(call: Call) -> None:
    f = call.function
    out, places, weights = call.arguments
    rows, dim, tokens, choices = out.dim(0), out.dim(1), places.dim(0), places.dim(1)
    per_item = f.constant(I64, _ITEM_NUMBERS) // dim + 1

    def work(f: Function, item: Value, *captured: Value) -> None:
        out, places, weights, summed, rows, dim, tokens, choices, per_item = captured
        first = item * per_item

        def token(t: Value) -> None:
            def lanes(at: Value) -> None:
                def add(choice: Value, total: Value) -> Value:
                    pair = t * choices + choice
                    row = f.convert("sext", f.load(I32, places, pair * 4), I64)
                    # A row without a pair is undefined: it may hold NaN
                    chosen = row < rows
                    weight = f.select(chosen, f.load(F32, weights, pair * 4), f.constant(F32, 0.0))
                    source = f.at(out, (f.select(chosen, row, 0) * dim + at) * 4)
                    with_row = f.fma(f.broadcast(weight, _LANES.lanes), f.load(_LANES, source), total)
                    return f.select(chosen, with_row, total)

                [total] = f.loop(choices, add, f.constant(_LANES, 0))
                f.store(total, summed, (t * dim + at) * 4)

            f.loop(dim, lanes, step=_LANES.lanes)

        f.loop(f.minimum(first + per_item, tokens), token, start=first)

    arrays = out.data, places.data, weights.data, call.results[0].data
    items = (tokens + per_item - 1) // per_item
    call.parallel_for(items, [*arrays, rows, dim, tokens, choices, per_item], work)
