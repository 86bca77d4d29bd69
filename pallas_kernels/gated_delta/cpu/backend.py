"""The CPU's backend: one kernel a call, which LLVM compiles for the machine it runs on.

The kernel shares its work items among XLA's threads: some of the values of a key head of a row, see `items.py`. For XLA
it is one operation that updates all states in place. A token's numbers are computed in one order, so they have the same
bits however its sequence is divided into steps.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import cpu
from pallas_kernels.cpu.emit import Function, Module, Value
from pallas_kernels.cpu.ffi import Call, handler
from pallas_kernels.cpu.types import I64, PTR
from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta.arguments import DeltaRows, DeltaWeights
from pallas_kernels.gated_delta.cpu.items import compute_item, num_panels
from pallas_kernels.gated_delta.cpu.operands import (
    LANES,
    NUMBER_BYTES,
    CpuDelta,
    DeltaOperands,
    clear_bytes,
    int_at,
)
from pallas_kernels.gated_delta.cpu.panels import panel_sizes
from pallas_kernels.gated_delta.cpu.tokens import write_convolution
from pallas_kernels.gated_delta.layout import DeltaStates
from pallas_kernels.gated_delta.problem import DeltaProblem
from pallas_kernels.target import KernelTarget

TAPS = (2, 4, 8)
MAX_DIM = 256

# With fewer key heads of rows a thread than this, an item is one panel.
_SPARE_HEADS = 2
_NUM_ARGUMENTS = 22


def refusal(problem: DeltaProblem, target: KernelTarget) -> str | None:
    """Return what isn't supported (dtype, size of a head, taps of the convolution), or None."""
    if problem.dtype.name not in NUMBER_BYTES:
        return f"cpu computes in {' and '.join(NUMBER_BYTES)}, not {problem.dtype.name}"
    for what, dim in (("keys", problem.key_dim), ("values", problem.value_dim)):
        if dim % LANES or not LANES <= dim <= MAX_DIM:
            return f"cpu takes {what} of {LANES} to {MAX_DIM} in steps of {LANES}, not of {dim}"
    if problem.taps not in TAPS:
        return f"cpu takes convolutions of {', '.join(map(str, TAPS))} taps, not of {problem.taps}"
    return None


def gated_delta(
    products: Float[Array, "tokens key_heads width"],
    gates: Float[Array, "tokens key_heads two group"],
    weights: DeltaWeights,
    states: DeltaStates,
    layer: int | Int[Array, ""],
    rows: DeltaRows,
    backend: Backend,
) -> tuple[Float[Array, "tokens value_heads value_dim"], DeltaStates]:
    """Compute `api.gated_delta`."""
    tokens, _, value_heads, key_dim, value_dim = len(products), *states.recurrent.shape[1:]
    assert states.inputs.dtype == products.dtype, (states.inputs.dtype, products.dtype)
    facts = CpuDelta(
        group=gates.shape[3],
        key_dim=key_dim,
        value_dim=value_dim,
        taps=weights.conv.shape[2],
        ring=states.ring,
        recent=states.recent,
        dtype=products.dtype.name,
        gates_dtype=gates.dtype.name,
        weights_dtype=weights.conv.dtype.name,
    )
    integers = (
        layer,
        rows.slots,
        rows.query_starts,
        rows.lens,
        rows.folded,
        rows.certain,
        rows.sources,
        rows.targets,
        rows.snapshots,
        rows.snapshot_lens,
        rows.num_seqs,
    )
    arrays = jax.tree.leaves(states)
    out, *updated = cpu.call(
        GatedDelta(facts),
        [
            jax.ShapeDtypeStruct((tokens, value_heads, value_dim), products.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
        ],
        *arrays,
        products,
        gates,
        weights.conv,
        *(x.astype(jnp.float32) for x in (weights.rate, weights.bias)),
        *(jnp.asarray(x, jnp.int32) for x in integers),
        in_place={i: 1 + i for i in range(len(arrays))},
    )
    return out, DeltaStates(*updated)


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """The kernel of calls with these static facts, for any shapes."""

    facts: CpuDelta

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return self.facts.name

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        for channels in {self.facts.key_dim, panel_sizes(self.facts.value_dim, features).columns}:
            write_convolution(module, self.facts, channels, features)
        handler(module, self.name, _NUM_ARGUMENTS, 7, lambda call: _write_call(call, self.facts, features))


def _write_call(call: Call, facts: CpuDelta, features: frozenset[str]) -> None:
    f = call.function
    products, gates, conv, rate, bias, layer, *integers, num_seqs = call.arguments[6:]
    out, *states = call.results
    zero = f.constant(I64, 0)
    layer_now, live = (int_at(f, one.data, zero) for one in (layer, num_seqs))
    query_starts = integers[1].data
    size = NUMBER_BYTES[facts.dtype]
    number_bytes = 4, size, 4, 4, 4, size

    def of_layer(index: int) -> Value:
        array = states[index]
        count = array.dim(1)
        for axis in range(2, 4 if index == 4 else 5):
            count = count * array.dim(axis)
        return f.at(array.data, layer_now * count * number_bytes[index])

    key_heads = products.dim(1)
    heads = live * key_heads
    panels = num_panels(facts, features)
    spare = heads >= call.num_threads * _SPARE_HEADS
    item_panels = f.select(spare, f.constant(I64, panels), 1)
    items = heads * f.select(spare, f.constant(I64, 1), panels)
    counters = f.call("malloc", PTR, heads * 8)
    clear_bytes(f, counters, heads * 8)
    pointers = [one.data for one in (products, gates, conv, rate, bias, out)]
    pointers += [of_layer(index) for index in range(len(states))]
    pointers += [one.data for one in integers]
    operands = DeltaOperands._make([*pointers, live, key_heads, item_panels, counters])
    # So that the program computes the same from the output of padding each time
    token_bytes = key_heads * (facts.group * facts.value_dim * size)
    done = int_at(f, query_starts, live)
    clear_bytes(f, f.at(out.data, done * token_bytes), (products.dim(0) - done) * token_bytes)

    def run_item(f: Function, item: Value, *fields: Value) -> None:
        compute_item(f, item, DeltaOperands(*fields), facts, features)

    call.parallel_for(items, list(operands), run_item)
    f.call("free", None, counters)
