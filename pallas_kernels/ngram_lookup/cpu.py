"""The lookup on a CPU: one call in place of XLA's many small operations, each of which costs more than its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
from jaxtyping import Array, Int

from pallas_kernels.cpu import call
from pallas_kernels.cpu.emit import Module, Value
from pallas_kernels.cpu.ffi import Buffer, Call, handler
from pallas_kernels.cpu.types import I32, I64
from pallas_kernels.ngram_lookup.index import GOLDEN, PRIME, NgramIndex, NgramLookup


def propose(
    index: NgramIndex,
    drafts: Int[Array, "slots max_drafts"],
    counts: Int[Array, " slots"],
    token_slots: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    tokens: Int[Array, " tokens"],
    slots: Int[Array, " rows"],
    lookup: NgramLookup,
) -> tuple[NgramIndex, Int[Array, "slots max_drafts"], Int[Array, " slots"]]:
    """Compute `reference.propose` in place. Of n-grams with the same entry of a table, the last one is stored."""
    written = index.history, index.lengths, index.own, index.shared, drafts, counts
    history, lengths, own, shared, drafts, counts = call(
        ProposeByNgrams(lookup.shortest, lookup.longest),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        *written,
        index.namespaces,
        token_slots,
        positions,
        tokens,
        slots,
        in_place={i: i for i in range(len(written))},
    )
    return NgramIndex(history, lengths, index.namespaces, own, shared), drafts, counts


@dataclasses.dataclass(frozen=True)
class ProposeByNgrams:
    """The kernel of `propose`, on one thread."""

    shortest: int
    longest: int

    @property
    def name(self) -> str:
        """See `cpu.Kernel`."""
        return f"llvm_propose_by_ngrams_{self.shortest}_to_{self.longest}"

    def write(self, module: Module, features: frozenset[str]) -> None:
        """See `cpu.Kernel`."""
        handler(module, self.name, 11, 6, lambda call: _Propose(call, self.shortest, self.longest).write())


class _Propose:
    """Writes one call. Slots, positions and indices are i64; tokens and hashes i32."""

    def __init__(self, call: Call, shortest: int, longest: int) -> None:
        self.f = call.function
        self.shortest, self.longest = shortest, longest
        self.history, self.lengths, self.own, self.shared, self.drafts, self.counts = call.results
        self.namespaces, self.token_slots, self.positions, self.tokens, self.slots = call.arguments[6:]
        self.num_slots, self.max_tokens = self.history.dim(0), self.history.dim(1)
        self.num_entries, self.max_drafts = self.own.dim(2), self.drafts.dim(1)

    def write(self) -> None:
        # N-grams may contain other tokens of this call, and a draft may be found among the tokens of another row.
        self._for_each_token(self._add_token)
        self._for_each_token(self._add_ngrams)

        def row(i: Value) -> None:
            slot = self._int(self.slots, i)
            self.f.when((slot >= 0) & (slot < self.num_slots), lambda: self._draft(slot))

        self.f.loop(self.slots.dim(0), row)

    def _for_each_token(self, body: Callable[[Value, Value, Value], None]) -> None:
        """Run `body(i, slot, position)` for each token that isn't dropped."""

        def token(i: Value) -> None:
            slot, position = self._int(self.token_slots, i), self._int(self.positions, i)
            has_slot = (slot >= 0) & (slot < self.num_slots)
            valid = has_slot & (position >= 0) & (position < self.max_tokens)
            self.f.when(valid, lambda: body(i, slot, position))

        self.f.loop(self.tokens.dim(0), token)

    def _add_token(self, i: Value, slot: Value, position: Value) -> None:
        self._store(self.f.load(I32, self.tokens.data, i * 4), self.history, slot * self.max_tokens + position)
        self._store(self.f.maximum(self._int(self.lengths, slot), position + 1), self.lengths, slot)

    def _add_ngrams(self, _: Value, slot: Value, position: Value) -> None:
        entries = self._entries(slot, self._tokens_before(slot, position))
        for size, (own, shared) in enumerate(entries, start=self.shortest):

            def add(own: Value = own, shared: Value = shared) -> None:
                self._store(position, self.own, own)
                self._store(slot * self.max_tokens + position, self.shared, shared)

            self.f.when(position >= size, add)

    def _draft(self, slot: Value) -> None:
        """Replace the draft of a slot."""
        f = self.f
        length = self._int(self.lengths, slot)
        tail = self._tokens_before(slot, length)
        places = []
        for own, shared in self._entries(slot, tail):
            flat = f.convert("zext", f.load(I32, self.shared.data, shared * 4), I64)
            places.append(((slot, self._int(self.own, own)), (flat // self.max_tokens, flat % self.max_tokens)))
        score, source, place = f.constant(I64, -1), slot, length
        for where, at in (candidate for group in zip(*places, strict=True) for candidate in group):
            own_bonus = f.convert("zext", where.equals(slot), I64)
            one = 2 * self._matched(tail, length, slot, where, at) + own_bonus
            better = one > score
            score, source, place = (f.select(better, *x) for x in ((one, score), (where, source), (at, place)))

        is_own = source.equals(slot)
        left = f.maximum(self._int(self.lengths, source) - place, 1)

        def copy(i: Value) -> None:
            # If the place is so near the end that the draft passes it, the draft repeats the tokens up to the end.
            at = f.minimum(place + f.select(is_own, i % left, i), self.max_tokens - 1)
            token = self._int(self.history, source * self.max_tokens + at)
            self._store(token, self.drafts, slot * self.max_drafts + i)

        f.loop(self.max_drafts, copy)
        count = f.select(is_own, self.max_drafts, f.minimum(left, self.max_drafts))
        self._store(f.select(score > 1, count, 0), self.counts, slot)

    def _matched(self, tail: list[Value], length: Value, slot: Value, source: Value, place: Value) -> Value:
        """Return how many tokens before a place of `source` are those of `tail`; 0 for a place that can't be used."""
        f = self.f
        usable = place < self._int(self.lengths, source)
        usable = usable & self._int(self.namespaces, source).equals(self._int(self.namespaces, slot))
        matched, same = f.constant(I64, 0), usable
        for back, (token, known) in enumerate(zip(tail, self._tokens_before(source, place), strict=True)):
            same = same & token.equals(known) & (place > back) & (length > back)
            matched = matched + f.convert("zext", same, I64)
        return f.select(matched >= self.shortest, matched, 0)

    def _tokens_before(self, slot: Value, position: Value) -> list[Value]:
        """Return the `longest` tokens before a position, backwards; if there are fewer, any tokens follow."""
        f = self.f
        before = (f.maximum(position - (1 + back), 0) for back in range(self.longest))
        return [f.load(I32, self.history.data, (slot * self.max_tokens + at) * 4) for at in before]

    def _entries(self, slot: Value, tokens: list[Value]) -> Iterator[tuple[Value, Value]]:
        """Return the indices in both tables of the n-grams that `tokens` holds backwards, the shortest first."""
        f = self.f
        namespace = f.load(I32, self.namespaces.data, slot * 4)
        num_sizes = self.longest - self.shortest + 1
        state = f.constant(I32, 0)
        for number, token in enumerate(tokens, start=1 - self.shortest):
            state = self._mixed(state, token, GOLDEN - 2**32, 15)
            if number < 0:
                continue
            entry = f.convert("zext", state, I64) % self.num_entries
            shared = f.convert("zext", self._mixed(state, namespace, PRIME, 13), I64)
            shared = shared % (self.num_slots * self.num_entries)
            row, at = shared // self.num_entries, shared % self.num_entries
            first = (slot * num_sizes + number) * self.num_entries
            yield first + entry, (row * num_sizes + number) * self.num_entries + at

    def _mixed(self, state: Value, number: Value, multiplier: int, shift: int) -> Value:
        state = self.f.binary("xor", state, number) * multiplier
        return self.f.binary("xor", state, state >> shift)

    def _int(self, array: Buffer, i: Value) -> Value:
        return self.f.convert("sext", self.f.load(I32, array.data, i * 4), I64)

    def _store(self, value: Value, array: Buffer, i: Value) -> None:
        value = value if value.type == I32 else self.f.convert("trunc", value, I32)
        self.f.store(value, array.data, i * 4)
