"""Sequences that a backend computes in many steps, with the rows and slots that an engine would give them.

Before each step, all that the contract doesn't keep is replaced by NaN: free rows and slots, and entries of rejected
drafts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.dispatch import BackendName
from pallas_kernels.gated_delta import BLOCK, DeltaRows, DeltaStates
from tests.pallas_kernels.gated_delta.cases import (
    Batch,
    Case,
    empty_states,
    random_tokens,
    random_weights,
)
from tests.pallas_kernels.gated_delta.test_gated_delta import run

NUM_STATES, NUM_SLOTS = 24, 8


@dataclasses.dataclass(frozen=True)
class Advance:
    """A row of a step: `new` tokens of a sequence, of which `drafts` aren't certain, and `wrong` others after them,
    which are rejected.

    With `moves`, the state is written to another row. `snapshot` is a border at which another row gets the state.
    """

    sequence: int
    new: int
    drafts: int = 0
    wrong: int = 0
    moves: bool = False
    snapshot: int | None = None


@dataclasses.dataclass
class _Place:
    """What is where: a sequence's row, its slot, and the positions from which on tokens and inputs are in the slot."""

    row: int
    slot: int
    length: int
    folded: int
    first_input: int


class Walk:
    """Computes sequences of up to `longest` tokens by steps of a backend.

    `outputs` are by sequence and token, `borders` the rows of the pool by sequence and border, and `entries` what a
    slot had of a token when it was computed.
    """

    def __init__(self, case: Case, backend: BackendName, sequences: int, longest: int) -> None:
        rng = np.random.default_rng(case.seed)
        self.longest = longest
        self.case, self.backend = case, backend
        self.weights = random_weights(case, rng)
        self.tokens = [random_tokens(case, rng, longest) for _ in range(sequences)]
        self.wrong = random_tokens(case, rng, case.num_tokens)
        shape = sequences, longest, case.layout.value_heads, case.value_dim
        self.outputs = np.full(shape, np.nan, case.layout.dtype)
        self.borders: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self.entries: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self.snapshots: dict[tuple[int, int], int] = {}
        self._states = empty_states(case, NUM_STATES, NUM_SLOTS)
        self._rows, self._slots = (rng.permutation(count).tolist() for count in (NUM_STATES, NUM_SLOTS))
        self._places = [self._placed() for _ in range(sequences)]

    def length(self, sequence: int) -> int:
        """Return the number of tokens that a sequence has."""
        return self._places[sequence].length

    def folded(self, sequence: int) -> int:
        """Return the number of tokens in a sequence's state."""
        return self._places[sequence].folded

    def restart(self, sequence: int, border: int) -> None:
        """Let a sequence begin again after `border` tokens: from a snapshot, or from nothing."""
        old = self._places[sequence]
        self._rows.append(old.row)
        self._slots.append(old.slot)
        self._places[sequence] = self._placed(border)

    def step(self, *advances: Advance) -> None:
        """Compute a step."""
        case = self.case
        products, gates, named, released = [], [], [], []
        for one in advances:
            place = self._places[one.sequence]
            at, stop = place.length, place.length + one.new
            for into, right, wrong in zip((products, gates), self.tokens[one.sequence], self.wrong, strict=True):
                into += [right[at:stop], wrong[: one.wrong]]
            # The state of a sequence that begins with a snapshot is still there
            source = self.snapshots[one.sequence, at] if at and at == place.folded and place.row < 0 else place.row
            if place.row < 0 or one.moves:
                place.row, old = self._rows.pop(), place.row
                released += [old] if old >= 0 else []
            snapshot = -1
            if one.snapshot is not None and (one.sequence, one.snapshot) not in self.snapshots:
                snapshot = self.snapshots[one.sequence, one.snapshot] = self._rows.pop()
            certain = stop - one.drafts
            named.append(
                (
                    place.slot,
                    at,
                    place.folded,
                    certain,
                    source,
                    place.row,
                    snapshot,
                    one.snapshot or 0,
                    one.new + one.wrong,
                )
            )
        *columns, counts = np.array(named, np.int32).T
        padding = case.num_rows - len(named)
        # The reference has one form for all steps, and takes seconds to compile
        decode_only = self.backend != "reference" and all(count == 1 for count in counts)
        total = case.num_rows if decode_only else case.num_tokens
        starts = np.concatenate([[0], np.cumsum(counts), np.full(padding, counts.sum())]).astype(np.int32)
        batch = Batch(
            *(
                np.concatenate([*some, np.full((total - starts[-1], *like.shape[1:]), np.nan, like.dtype)])
                for some, like in zip((products, gates), self.wrong, strict=True)
            ),
            self.weights,
            self._states,
            DeltaRows(
                *(np.concatenate([column, np.zeros(padding, np.int32)]) for column in columns[:1]),
                starts,
                *(np.concatenate([column, np.zeros(padding, np.int32)]) for column in columns[1:]),
                num_seqs=np.int32(len(named)),
                decode_only=decode_only,
            ),
            [],
        )
        out, states = run(case, batch, self.backend)
        for r, (one, row) in enumerate(zip(advances, named, strict=True)):
            self._record(one, out[starts[r] :][: one.new], states, certain=row[3], snapshot=row[6])
        self._states = self._kept(states)
        self._rows += released  # another row of this step must not write what is read

    def _placed(self, border: int = 0) -> _Place:
        return _Place(-1 if border else self._rows.pop(), self._slots.pop(0), border, border, border)

    def _record(self, one: Advance, out: np.ndarray, states: DeltaStates, certain: int, snapshot: int) -> None:
        place, layer = self._places[one.sequence], self.case.layer
        at, stop = place.length, place.length + one.new
        self.outputs[one.sequence, at:stop] = out
        place.folded = max(certain // BLOCK * BLOCK, place.folded)
        place.length = stop
        place.first_input = max(place.folded, stop + one.wrong - states.recent)
        written = [(place.folded, place.row)] + ([(one.snapshot or 0, snapshot)] if snapshot >= 0 else [])
        for border, row in written:
            if border:
                self.borders[one.sequence, border] = tuple(pool[layer, row].copy() for pool in states.pools)
        for position in range(max(at, place.folded), stop):
            arrays = states.keys, states.deltas, states.decays
            self.entries[one.sequence, position] = tuple(
                array[layer, place.slot, :, position % states.ring].copy() for array in arrays
            )

    def _kept(self, states: DeltaStates) -> DeltaStates:
        """Return the states with NaN wherever nothing is kept."""
        kept, layer = empty_states(self.case, NUM_STATES, NUM_SLOTS), self.case.layer
        rows = [place.row for place in self._places if place.row >= 0 and place.folded]
        for row in (*rows, *self.snapshots.values()):
            for to, pool in zip(kept.pools, states.pools, strict=True):
                to[layer, row] = pool[layer, row]
        for place in self._places:
            for name, first, count in (
                ("keys", place.folded, states.ring),
                ("deltas", place.folded, states.ring),
                ("decays", place.folded, states.ring),
                ("inputs", place.first_input, states.recent),
            ):
                for position in range(first, place.length):
                    at = layer, place.slot, slice(None), position % count
                    getattr(kept, name)[at] = getattr(states, name)[at]
        return kept
