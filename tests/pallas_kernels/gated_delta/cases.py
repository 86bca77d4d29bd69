"""The table of cases that every backend passes, and the arrays of a case.

A case is a step of several sequences. All arrays of states hold NaN wherever the contract says that nothing is read:
rows of the pool that are no source, other layers, other slots, and entries of a slot for tokens that it doesn't have.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta import BLOCK, DeltaLayout, DeltaProblem, DeltaRows, DeltaStates, DeltaWeights
from tests.pallas_kernels.gated_delta.naive import History, history


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence with `before` tokens, of which the state in its source has `folded` (by default whole blocks), that
    gets `new` ones, the last `drafts` of them not certain.

    With `moves`, its target isn't its source. `snapshot` is the border at which another row gets the state.
    """

    before: int
    new: int = 1
    drafts: int = 0
    folded: int | None = None
    moves: bool = False
    snapshot: int | None = None

    @property
    def begin(self) -> int:
        """The tokens of the state before the step."""
        return self.before // BLOCK * BLOCK if self.folded is None else self.folded

    @property
    def end(self) -> int:
        """The tokens after the step."""
        return self.before + self.new

    @property
    def certain(self) -> int:
        """The tokens that stay."""
        return self.end - self.drafts

    @property
    def border(self) -> int:
        """The tokens of the state after the step."""
        return max(self.certain // BLOCK * BLOCK, self.begin)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences and sizes. The program has `num_rows` rows, and `num_tokens` tokens unless it has decodes only.

    `gates_dtype` and `weights_dtype` are `dtype` if they are None. The decay of a token is about `exp(-exp(rate))`.
    """

    name: str
    sequences: tuple[Sequence, ...]
    key_heads: int = 2
    group: int = 1
    key_dim: int = 32
    value_dim: int = 32
    taps: int = 4
    dtype: str = "float32"
    gates_dtype: str | None = None
    weights_dtype: str | None = None
    max_drafts: int = 0
    rate: float = -2.0
    num_layers: int = 2
    layer: int = 1
    num_rows: int = 6
    num_tokens: int = 96
    decode_only: bool = False
    max_queries: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def layout(self) -> DeltaLayout:
        """The layout of its states."""
        return DeltaLayout(
            num_layers=self.num_layers,
            key_heads=self.key_heads,
            value_heads=self.key_heads * self.group,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            taps=self.taps,
            dtype=jnp.dtype(self.dtype),
            max_drafts=self.max_drafts,
        )

    @property
    def problem(self) -> DeltaProblem:
        """The facts by which a backend refuses."""
        heads = self.key_heads, self.key_heads * self.group
        return DeltaProblem(*heads, self.key_dim, self.value_dim, self.taps, jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of `gated_delta`, and the whole history of each sequence up to the end of the step."""

    products: np.ndarray
    gates: np.ndarray
    weights: DeltaWeights
    states: DeltaStates
    rows: DeltaRows
    histories: list[History]


def random_tokens(case: Case, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return products and gates of `count` tokens."""
    layout = case.layout
    products = rng.standard_normal((count, case.key_heads, layout.width), dtype=np.float32)
    gates = rng.standard_normal((count, case.key_heads, 2, case.group), dtype=np.float32)
    return products.astype(layout.dtype), gates.astype(jnp.dtype(case.gates_dtype or case.dtype))


def random_weights(case: Case, rng: np.random.Generator) -> DeltaWeights:
    """Return the weights of a case's layer."""
    layout = case.layout
    conv = rng.standard_normal((case.key_heads, layout.width, case.taps), dtype=np.float32)
    rate = case.rate + rng.uniform(-1, 1, layout.value_heads).astype(np.float32)
    bias = rng.standard_normal(layout.value_heads, dtype=np.float32)
    return DeltaWeights(conv.astype(jnp.dtype(case.weights_dtype or case.dtype)), rate, bias)


def whole_history(case: Case, weights: DeltaWeights, products: np.ndarray, gates: np.ndarray) -> History:
    """Compute a sequence of a case."""
    return history(products, gates, weights.conv, weights.rate, weights.bias, case.layout)


def empty_states(case: Case, num_states: int, num_slots: int) -> DeltaStates:
    """Return states that hold NaN everywhere."""
    layout = case.layout
    recurrent, tails = layout.pool_shapes(num_states)
    *entries, inputs = layout.slot_shapes(num_slots)
    kinds = (recurrent, np.float32), (tails, layout.dtype), *((shape, np.float32) for shape in entries)
    return DeltaStates(*(np.full(shape, np.nan, dtype) for shape, dtype in (*kinds, (inputs, layout.dtype))))


def make_batch(case: Case) -> Batch:
    """Return random arrays of a case."""
    rng = np.random.default_rng(case.seed)
    weights = random_weights(case, rng)
    num_states, num_slots = 3 * case.num_rows + 2, case.num_rows + 2
    states = empty_states(case, num_states, num_slots)
    free_rows, free_slots = (rng.permutation(count).tolist() for count in (num_states, num_slots))
    count = sum(one.new for one in case.sequences)
    total = case.num_rows if case.decode_only else case.num_tokens
    assert count <= total, case.name
    assert len(case.sequences) <= case.num_rows, case.name
    padding = total - count
    products, gates, histories, named = [], [], [], []
    for one in case.sequences:
        source, slot = free_rows.pop(), free_slots.pop()
        target = free_rows.pop() if one.moves else source
        snapshot = -1 if one.snapshot is None else free_rows.pop()
        raw = random_tokens(case, rng, one.end)
        past = whole_history(case, weights, *raw)
        _put_past(case, states, one, past, source, slot)
        for into, some in zip((products, gates), raw, strict=True):
            into.append(some[one.before :])
        histories.append(past)
        named.append((slot, one.before, one.begin, one.certain, source, target, snapshot, one.snapshot or 0))
    # Padding rows have numbers of other rows, as rows of an earlier step may
    stale = named[0] if named else (0, 5, 0, 6, 0, 1, 2, 16)
    columns = np.array(named + [stale] * (case.num_rows - len(named)), np.int32).T
    for into, some in zip((products, gates), random_tokens(case, rng, padding), strict=True):
        into.append(np.full_like(some, np.nan))
    starts = np.cumsum([0, *(one.new for one in case.sequences)])
    return Batch(
        products=np.concatenate(products),
        gates=np.concatenate(gates),
        weights=weights,
        states=states,
        rows=DeltaRows(
            columns[0],
            np.concatenate([starts, np.repeat(starts[-1:], case.num_rows - len(named))]).astype(np.int32),
            *columns[1:],
            num_seqs=np.int32(len(named)),
            decode_only=case.decode_only,
            max_queries=case.max_queries,
        ),
        histories=histories,
    )


def _put_past(case: Case, states: DeltaStates, one: Sequence, past: History, source: int, slot: int) -> None:
    """Write what the pool and the slot have of a sequence before the step."""
    if one.begin:
        states.recurrent[case.layer, source] = past.state(one.begin)
        states.tails[case.layer, source] = past.tail(one.begin, case.taps)
    for position in range(one.begin, one.before):
        entry = position % states.ring
        states.keys[case.layer, slot, :, entry] = past.keys[position]
        states.deltas[case.layer, slot, :, entry] = past.deltas[position]
        states.decays[case.layer, slot, :, entry] = past.sums[position]
    for position in range(max(one.begin, one.before - states.recent), one.before):
        states.inputs[case.layer, slot, :, position % states.recent] = past.inputs[position]


def check(case: Case, batch: Batch, out: np.ndarray, states: DeltaStates) -> None:
    """Assert that outputs and states are those of the histories, and that nothing else has changed."""
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-5
    states = DeltaStates(*(np.array(getattr(states, field.name)) for field in dataclasses.fields(states)))

    def close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
        scale = float(np.abs(expected).max(initial=1e-3))
        found = np.asarray(found).astype(np.float64)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what)

    assert out.dtype == batch.products.dtype
    starts, rows, layer = batch.rows.query_starts, batch.rows, case.layer
    rest = dataclasses.replace(
        batch.states, **{field.name: getattr(batch.states, field.name).copy() for field in dataclasses.fields(states)}
    )
    for r, (one, past) in enumerate(zip(case.sequences, batch.histories, strict=True)):
        close(out[starts[r] : starts[r + 1]], past.outputs[one.before :], f"outputs of row {r}")
        written = [(rows.targets[r], one.border, one.border > one.begin or one.moves)]
        written.append((rows.snapshots[r], one.snapshot or 0, one.snapshot is not None))
        for to, border, changed in written:
            if changed and border:
                close(states.recurrent[layer, to], past.state(border), f"state {border} of row {r}")
                np.testing.assert_array_equal(states.tails[layer, to], past.tail(border, case.taps))
            if changed:
                for pool, before in zip(states.pools, rest.pools, strict=True):
                    pool[layer, to] = before[layer, to]
        slot = rows.slots[r]
        for position in range(one.border, one.end):
            entry = position % states.ring
            close(states.keys[layer, slot, :, entry], past.keys[position], f"key {position} of row {r}")
            close(states.deltas[layer, slot, :, entry], past.deltas[position], f"delta {position} of row {r}")
            close(states.decays[layer, slot, :, entry], past.sums[position], f"decay {position} of row {r}")
        for position in range(max(one.border, one.end - states.recent), one.end):
            found = states.inputs[layer, slot, :, position % states.recent]
            np.testing.assert_array_equal(found, past.inputs[position], err_msg=f"input {position} of row {r}")
        for name in ("keys", "deltas", "decays", "inputs"):
            getattr(states, name)[layer, slot] = getattr(rest, name)[layer, slot]
    for field in dataclasses.fields(states):
        found, before = (bits(getattr(some, field.name)) for some in (states, rest))
        np.testing.assert_array_equal(found, before, err_msg=f"other {field.name} have changed")


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bits as integers: then NaN equals NaN, and -0 is not 0."""
    array = np.ascontiguousarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


_DECODES = (
    Sequence(0),
    Sequence(5),
    Sequence(15),
    Sequence(16, moves=True),
    Sequence(47, moves=True, snapshot=48),
    Sequence(37, moves=True),
)
# Whole prompts, chunks that begin inside a block or at a border, and rows that cross several borders
_CHUNKS = (
    Sequence(0, 16, snapshot=16),
    Sequence(5, 30, snapshot=16),
    Sequence(32, 3, moves=True),
    Sequence(30, 20, moves=True, snapshot=48),
    Sequence(0, 7),
)
_MIXED = (Sequence(20), Sequence(31), Sequence(9, 40, snapshot=32), Sequence(16, 33, moves=True), Sequence(0, 1))
# Drafts at borders; rows whose drafts were accepted, so that a block is whole before the step
_DRAFTS = (
    Sequence(13, 5, drafts=4),
    Sequence(14, 5, drafts=2, snapshot=16),
    Sequence(18, 5, drafts=4, folded=0),
    Sequence(35, 3, drafts=2, folded=16, moves=True, snapshot=32),
    Sequence(31, 5, drafts=4),
    Sequence(46, 1, folded=32),
)

CASES = [
    Case("decode", _DECODES, decode_only=True),
    Case("chunks", _CHUNKS),
    Case("mixed", _MIXED),
    Case("drafts", _DRAFTS, max_drafts=4, max_queries=5),
    Case("nothing-live", ()),
    Case("nothing-live-decode", (), decode_only=True),
    Case("one-decode", (Sequence(21),), decode_only=True),
    Case("no-padding", (Sequence(3, 60), Sequence(31, 36, snapshot=64)), num_rows=2, num_tokens=96),
    Case("first-layer-of-one", _MIXED, num_layers=1, layer=0),
    Case("one-long-row", (Sequence(7, 89, snapshot=80),)),
    Case("decodes-in-a-mixed-program", _DECODES),
    Case("drafts-of-two-blocks", (Sequence(10, 17, drafts=16), Sequence(31, 17, drafts=16)), max_drafts=16),
    Case("all-drafts-were-accepted", (Sequence(31, 4, drafts=3, folded=0, snapshot=32),), max_drafts=16),
    Case("chunks-beside-drafts", (*_CHUNKS, Sequence(18, 5, drafts=4, folded=0)), max_drafts=4),
    Case("nothing-new", (Sequence(20, 0, moves=True), Sequence(18, 0, folded=0), Sequence(7, 2)), max_drafts=4),
    Case("slow-decay", _MIXED, rate=-9.0),
    Case("fast-decay", _MIXED, rate=3.5),
    Case("bf16", _MIXED, dtype="bfloat16"),
    Case("decode-bf16", _DECODES, dtype="bfloat16", decode_only=True),
    Case("bf16-gates-in-float32", _MIXED, dtype="bfloat16", gates_dtype="float32", weights_dtype="float32"),
    Case("drafts-bf16-taps-2", _DRAFTS, dtype="bfloat16", taps=2, max_drafts=4, max_queries=5),
    Case("taps-2", _MIXED, taps=2),
    Case("group-2", _MIXED, key_heads=4, group=2, key_dim=64, value_dim=48),
    Case("group-4", _MIXED, key_heads=1, group=4, key_dim=16, value_dim=128),
    Case("decode-group-4", _DECODES, key_heads=2, group=4, key_dim=16, value_dim=128, decode_only=True),
    Case("drafts-group-2", _DRAFTS, key_heads=2, group=2, key_dim=128, value_dim=64, max_drafts=4, max_queries=5),
    Case("heads-of-128", _MIXED, group=2, key_dim=128, value_dim=128),
    Case("heads-of-128-bf16", _MIXED, group=2, key_dim=128, value_dim=128, dtype="bfloat16"),
    Case("one-head", _CHUNKS, key_heads=1, key_dim=64, value_dim=16),
    Case("eight-heads-bf16", _CHUNKS, key_heads=8, key_dim=16, value_dim=16, dtype="bfloat16"),
    Case("a-decode-of-8-heads", (Sequence(15), Sequence(40)), key_heads=8, key_dim=64, value_dim=32, decode_only=True),
]

CORNERS = ("decode", "mixed", "drafts", "group-2")
"""Cases for backends that are slow here."""
MORE = (
    *("first-layer-of-one", "decodes-in-a-mixed-program", "group-4", "decode-group-4", "drafts-group-2"),
    *("heads-of-128", "one-head", "eight-heads-bf16", "a-decode-of-8-heads"),
)
"""Cases that `make test` leaves out on every backend."""
