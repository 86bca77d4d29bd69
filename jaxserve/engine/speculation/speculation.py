"""Decides how many draft tokens each request verifies in a step, from measured acceptance and measured step times.

A step that verifies drafts takes longer than a decode step and yields more tokens, if drafts are accepted. So of the
programs that hold the running requests, the one with the most expected tokens a second runs; if that is the decode
program, nothing is verified. A decode step shows at no cost whether the first token of a draft that was looked up
would have been accepted, so that acceptance is known even while nothing is verified. A draft model only drafts tokens
that are verified, so now and then a step verifies some to learn how many are accepted.

The time of a step that computes prompts depends on the size of its program, which prompts rarely fill. Drafts that were
looked up fill the rest.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol

from jaxserve.engine.speculation.step_costs import FREE_TOKENS, STALE_STEPS, StepCosts
from jaxserve.step_plan import Capacity

# The weight of a draft token in the acceptance of its request, and in the acceptance assumed for new requests.
_WEIGHT = 0.2
_WEIGHT_FOR_NEW = 0.002
_INITIAL, _INITIAL_OF_A_MODEL = 0.3, 0.6

# Requests of similar acceptance verify drafts of the same length.
_LEVELS = 16

# Drafts must promise this much more tokens a second, as measurements are noisy.
_WORTH = 1.03

# Draft tokens with a lower chance of acceptance are not verified, even if the program has room for them. The limit for
# a draft model is below its lowest level, because only verifying shows whether its drafts have become better.
_UNLIKELY, _UNLIKELY_OF_A_MODEL = 1 / _LEVELS, 0.03

# The room that a step with prompts has for drafts costs only their logits, about a tenth of a decode of a large batch.
_WORTH_LOGITS = 0.25


class DraftedRequest(Protocol):
    """A request with drafts: `acceptance` is the share of draft tokens that were accepted, None before the first."""

    acceptance: float | None


class Speculation:
    """Chooses drafts within the programs of `capacity`.

    With more than `max_requests` decodes of a rank, it verifies none. `draft_cost` estimates what a token of a draft
    model costs, as a share of a decode step.
    """

    def __init__(self, capacity: Capacity, *, max_requests: int | None = None, draft_cost: float = 0.0) -> None:
        self._capacity = capacity
        self._verify_buckets = capacity.verify_buckets
        self._max_drafts = capacity.max_drafts
        self._max_requests = max_requests
        self._costs = StepCosts()
        self._draft_cost = draft_cost
        self._by_model = bool(capacity.draft_buckets)
        self._steps_without = 0
        self._new_acceptance = _INITIAL_OF_A_MODEL if self._by_model else _INITIAL
        # Lengths of drafts to choose from; a draft that was looked up is as long as it can be.
        halves = [self._max_drafts >> i for i in range(self._max_drafts.bit_length())] if self._by_model else ()
        self._draft_steps = tuple(sorted(halves)) or (self._max_drafts,)
        rates = [(level + 0.5) / _LEVELS for level in range(_LEVELS)]
        # Draft tokens by level and place, the likeliest first; of a level, each comes after those before it.
        self._places = sorted(
            (-(rate**place), level)
            for level, rate in enumerate(rates)
            for place in range(1, self._max_drafts + 1)
            if rate**place > (_UNLIKELY_OF_A_MODEL if self._by_model else _UNLIKELY)
        )
        self._num_drafts = 0
        self._draft_tokens = 0
        self._accepted_by_position = [0] * self._max_drafts

    def counts(self) -> dict[str, Any]:
        """Return the totals since the start, as `EngineStats` has them."""
        return {
            "num_drafts": self._num_drafts,
            "draft_tokens": self._draft_tokens,
            "accepted_tokens": sum(self._accepted_by_position),
            "accepted_by_position": tuple(self._accepted_by_position),
        }

    def choose(self, ranks: Sequence[Sequence[DraftedRequest]]) -> list[int] | None:
        """Return the length of drafts by level of acceptance, or None to verify none; `ranks` are the decodes of each.

        `level` tells the level of a request. All ranks run a program of the same size.
        """
        rows = max(map(len, ranks))
        if not rows or rows >= self._verify_buckets[-1]:
            return None
        if self._max_requests is not None and rows > self._max_requests:
            return None
        decode = self._decode_key(rows)
        decode_seconds = self._costs.of(decode)
        if decode_seconds is None or self._costs.age(decode) > STALE_STEPS:
            return None
        levels = list(zip(*map(self._count_levels, ranks)))
        if not self._by_model and not any(map(any, levels[1:])):
            return None  # no draft token is likely enough
        total = sum(map(len, ranks))
        best, best_lengths = _WORTH * total / decode_seconds, None
        if self._by_model and self._steps_without > STALE_STEPS:
            best = 0.0
        draft_seconds = self._draft_cost * decode_seconds
        known_size, known_seconds = max(rows, FREE_TOKENS), decode_seconds
        for size in self._verify_buckets[bisect.bisect_right(self._verify_buckets, rows) :]:
            for steps in self._draft_steps:
                gained, lengths, tokens = self._fill(levels, list(map(len, ranks)), size, steps)
                if not gained or self._step_key(tokens, self.draft_steps(max(lengths))) != (size, steps):
                    continue  # these drafts fit a smaller step, which would run instead
                drafting = steps * draft_seconds
                seconds = self._costs.of((size, steps))
                if seconds is None:  # it grows with the root of its tokens: between reading weights and multiplying
                    seconds = known_seconds * math.sqrt(max(size / known_size, 1.0)) + drafting
                else:
                    known_size, known_seconds = size, max(seconds - drafting, decode_seconds)
                    seconds = max(self._costs.hoped((size, steps)) or 0.0, decode_seconds)
                rate = (total + gained) / seconds
                if rate > best:
                    best, best_lengths = rate, lengths
            if rows * (1 + self._max_drafts) <= size:
                break
        return best_lengths

    def fill(self, ranks: Sequence[Sequence[DraftedRequest]], room: Sequence[int]) -> list[int] | None:
        """Return the lengths of drafts for a step with prompts that has room for `room[r]` more tokens of rank r."""
        if self._max_requests is not None and max(map(len, ranks)) > self._max_requests:
            return None
        levels, size = list(zip(*map(self._count_levels, ranks))), max(room)
        gained, lengths, _ = self._fill(levels, [size - own for own in room], size, self._max_drafts, _WORTH_LOGITS)
        return lengths if gained else None

    def draft_steps(self, longest: int) -> int:
        """Return how many tokens a draft model drafts for each request if the longest verified draft has `longest`."""
        return self._draft_steps[bisect.bisect_left(self._draft_steps, longest)]

    def level(self, request: DraftedRequest) -> int:
        """Return the level of a request's acceptance."""
        rate = request.acceptance
        if rate is None:
            rate = request.acceptance = self._new_acceptance
        return min(int(rate * _LEVELS), _LEVELS - 1)

    def count(self, request: DraftedRequest, proposed: int, accepted: int, *, verified: bool) -> None:
        """Count the draft of a committed chunk: `proposed` tokens were compared, and `accepted` of them were equal."""
        if self._by_model and not verified:
            return
        rate = self._new_acceptance if request.acceptance is None else request.acceptance
        new = self._new_acceptance
        for _ in range(accepted):
            rate += _WEIGHT * (1 - rate)
            new += _WEIGHT_FOR_NEW * (1 - new)
        if proposed > accepted or not proposed:
            rate -= _WEIGHT * rate
            new -= _WEIGHT_FOR_NEW * new
        request.acceptance, self._new_acceptance = rate, new
        if verified and proposed:
            self._num_drafts += 1
            self._draft_tokens += proposed
            for place in range(accepted):
                self._accepted_by_position[place] += 1

    def count_step(self, rows: int, tokens: int, seconds: float, draft_steps: int = 0) -> None:
        """Count the duration of a step of decodes, of the most `rows` and `tokens` that a rank has."""
        self._steps_without = 0 if tokens > rows else self._steps_without + 1
        if tokens > rows:
            self._costs.add(self._step_key(tokens, draft_steps or self._max_drafts), seconds)
        else:
            self._costs.add(self._decode_key(rows), seconds)

    def _step_key(self, tokens: int, draft_steps: int) -> tuple[int, int]:
        return self._capacity.bucket("verify", tokens), draft_steps

    def _decode_key(self, rows: int) -> str:
        return f"decode-{self._capacity.bucket('decode', rows)}"

    def _count_levels(self, requests: Sequence[DraftedRequest]) -> list[int]:
        counts = [0] * _LEVELS
        for request in requests:
            counts[self.level(request)] += 1
        return counts

    def _fill(
        self, levels: Sequence[Sequence[int]], tokens: list[int], size: int, most: int, least: float = 0.0
    ) -> tuple[float, list[int], int]:
        """Choose the draft tokens of a step of `size` tokens per rank, the likeliest first.

        `levels` counts the requests of each rank by level, `tokens` are those of each rank without drafts. Returns the
        expected number of accepted draft tokens, the length of drafts by level, at most `most`, and the tokens of the
        fullest rank. No draft token is less likely than `least`.
        """
        lengths, closed = [0] * _LEVELS, [not any(counts) for counts in levels]
        gained = 0.0
        for unlikeliness, level in self._places:
            if -unlikeliness < least:
                break
            if closed[level]:
                continue
            counts = levels[level]
            filled = list(map(operator.add, tokens, counts))
            if max(filled) > size:
                closed[level] = True
                continue
            tokens = filled
            lengths[level] += 1
            closed[level] = lengths[level] == most
            gained -= unlikeliness * sum(counts)
        return gained, lengths, max(tokens)
