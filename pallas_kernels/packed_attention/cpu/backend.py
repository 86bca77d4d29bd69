"""The CPU's backend: one kernel a call, which LLVM compiles for the machine it runs on.

The kernel lists the tiles of queries of all texts and shares them, for each KV head, among XLA's threads; `items.py`
has the code of an item. What a text's tokens are multiplied with, and in which order, depends on its own tokens alone,
so its bits are the same whichever texts are packed with it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import cpu
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import I1, I8, I64, PTR
from pallas_kernels.dispatch import Backend
from pallas_kernels.packed_attention.arguments import PackedOptions, PackedProblem, Texts
from pallas_kernels.packed_attention.cpu.blocks import CpuPacked, PackedOperands
from pallas_kernels.packed_attention.cpu.items import TASK_BYTES, attend, tile_queries
from pallas_kernels.paged_attention.cpu.tiles import LANES, int_at
from pallas_kernels.target import KernelTarget

DTYPES = ("float32", "bfloat16")
MAX_HEAD_DIM = 256


def refusal(problem: PackedProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype or head size), or None."""
    if problem.dtype.name not in DTYPES:
        return f"cpu computes in {' and '.join(DTYPES)}, not {problem.dtype.name}"
    if problem.head_dim % LANES or not LANES <= problem.head_dim <= MAX_HEAD_DIM:
        return f"cpu takes heads of {LANES} to {MAX_HEAD_DIM} in steps of {LANES}, not of {problem.head_dim}"
    return None


def packed_attention(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    texts: Texts,
    options: PackedOptions,
    backend: Backend,
) -> Float[Array, "tokens heads head_dim"]:
    """Compute `api.packed_attention`."""
    facts = CpuPacked(
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[2],
        value_dim=None,
        dtype=q.dtype.name,
        kv_dtype=k.dtype.name,
        scale=float(options.scale),
        soft_cap=options.soft_cap,
        reach=options.reach,
        has_bias=options.distance_bias is not None,
    )
    operands = [q, k, v, *(jnp.asarray(x, jnp.int32) for x in texts)]
    if options.distance_bias is not None:
        operands.append(options.distance_bias.astype(jnp.float32))
    return cpu.call(PackedAttention(facts), jax.ShapeDtypeStruct(q.shape, q.dtype), *operands)


@dataclasses.dataclass(frozen=True)
class PackedAttention:
    """The kernel of calls with these static facts, for any shapes."""

    facts: CpuPacked

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return self.facts.name

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 5 + self.facts.has_bias, 1, lambda call: _write_call(call, self.facts, features))


def _write_call(call: Call, facts: CpuPacked, features: frozenset[str]) -> None:
    f = call.function
    q, k, v, starts, num_texts, *bias = call.arguments
    (out,) = call.results
    live_texts = int_at(f, num_texts.data, f.constant(I64, 0))
    null = f.constant(PTR, 0)
    operands = PackedOperands(
        q=q.data,
        keys=k.data,
        values=v.data,
        out=out.data,
        starts=starts.data,
        bias=bias[0].data if bias else null,
        tasks=null,
        kv_heads=k.dim(1),
        distances=bias[0].dim(1) if bias else f.constant(I64, 0),
    )
    _clear_padding(f, operands, int_at(f, operands.starts, live_texts), q.dim(0), facts)

    def tiles_of(text: Value) -> Value:
        start, stop = (int_at(f, operands.starts, text + i) for i in range(2))
        return (stop - start + (tile_queries(facts) - 1)) // tile_queries(facts)

    zero = f.constant(I64, 0)
    (tiles,) = f.loop(live_texts, lambda text, count: count + tiles_of(text), zero)
    tasks = f.call("malloc", PTR, tiles * TASK_BYTES + 64)

    def list_text(text: Value, count: Value) -> Value:
        own = tiles_of(text)

        def list_tile(i: Value) -> None:
            task = f.at(tasks, (count + i) * TASK_BYTES)
            f.store(text, task)
            f.store(i * tile_queries(facts), task, 8)

        f.loop(own, list_tile)
        return count + own

    f.loop(live_texts, list_text, zero)

    def run_item(f: Function, item: Value, *fields: Value) -> None:
        attend(f, item, PackedOperands(*fields), facts, features)

    call.parallel_for(tiles * operands.kv_heads, list(operands._replace(tasks=tasks)), run_item)
    f.call("free", None, tasks)


def _clear_padding(f: Function, operands: PackedOperands, live: Value, tokens: Value, facts: CpuPacked) -> None:
    """Set the output of padding to 0, so that the program computes the same from it each time."""
    row_bytes = operands.kv_heads * (facts.group * facts.head_dim * facts.q_bytes)
    to, size = f.at(operands.out, live * row_bytes), (tokens - live) * row_bytes
    f.call("llvm.memset.p0.i64", None, to, f.constant(I8, 0), size, f.constant(I1, 0))
