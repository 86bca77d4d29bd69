"""Drafts by prompt lookup: the tokens that followed the last n-gram of a sequence where it occurred before.

The device holds the tokens of each slot, and hash tables from n-grams to the position of the token that follows. Each
slot has a table of its own, which finds repetitions within its sequence. A table for all slots finds n-grams of other
requests of the namespace, running or ended, until their slot is used again. Each token costs the same time to add and
to look up, whatever the length of the context. A table knows only the latest place of an n-gram, and a later n-gram of
the same hash may replace it. So each place that is found is compared with the sequence, up to the longest n-gram. If
two places match equally long, the one in the sequence itself wins.

The method is prompt lookup decoding (Saxena 2023), over several sizes of n-grams.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Int, UInt32

# The multipliers of the hashes: 2^32 divided by the golden ratio, and a prime
GOLDEN, PRIME = 0x9E3779B9, 0x01000193


@dataclasses.dataclass(frozen=True)
class NgramLookup:
    """Looks up n-grams of `shortest` to `longest` tokens, for drafts of at most `max_drafts` tokens."""

    max_drafts: int
    longest: int
    shortest: int

    @property
    def sizes(self) -> range:
        """The sizes of n-grams, in the order of the tables."""
        return range(self.shortest, self.longest + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramIndex:
    """The tokens of each slot, `lengths` of them valid, and the tables by slot.

    `own` has positions within the sequence; `shared`, over all slots together, has `slot * max_tokens + position`. 0 is
    an empty entry, as no n-gram ends before position 0.
    """

    history: Int[Array, "slots max_tokens"]
    lengths: Int[Array, " slots"]
    namespaces: Int[Array, " slots"]
    own: Int[Array, "slots sizes entries"]
    shared: UInt32[Array, "slots sizes entries"]
