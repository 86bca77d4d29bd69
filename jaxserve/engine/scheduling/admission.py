"""Decides whether a request is accepted at all, and whether a waiting one may start now.

It works on sizes and knows neither the queue nor the pool. Its only state is the new-token ratio of SGLang's
`--schedule-conservativeness`, and which prompt a full queue refused last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from jaxserve.api_types import EngineRequest, FinishReason, TokenEvent, Usage
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.scheduling.request import Request
from jaxserve.errors import QueueFullError
from jaxserve.step_plan import Capacity

_INITIAL_RATIO = 0.7
_MIN_SHARE = 0.14
_DECAY_STEPS = 600
_STEPS_AFTER_RETRACTION = 20
_MAX_RESERVED_TOKENS = 4096


def rejection_reason(request: EngineRequest, capacity: Capacity) -> str | None:
    """Return why a request can never be served within `capacity`, or None."""
    length = len(request.prompt_ids)
    if length == 0:
        return "the prompt is empty; it needs at least one token"
    if request.pooled and not capacity.pooled_size:
        return "this engine generates tokens and pools nothing"
    if not request.pooled and not capacity.generates:
        return "this engine pools and generates no tokens"
    if length > capacity.max_model_len - (not request.pooled):
        if request.pooled:
            return f"the text has {length} tokens, more than the context length of {capacity.max_model_len}"
        return (
            f"the prompt has {length} tokens, which leaves no room for output within the context length of "
            f"{capacity.max_model_len}; shorten the prompt or raise --context-length"
        )
    if not capacity.encodes and -(-length // capacity.page_size) > capacity.num_pages:
        return (
            f"the prompt has {length} tokens, more than the {capacity.num_pages * capacity.page_size} of the whole KV "
            "cache; shorten the prompt or raise --max-total-tokens or --mem-fraction-static"
        )
    return None


def rejection(request: EngineRequest, error: str) -> TokenEvent:
    """Return the only event of a request that is refused."""
    return TokenEvent(
        request.request_id,
        [],
        finish_reason=FinishReason.ERROR,
        usage=Usage(len(request.prompt_ids), 0),
        error=error,
    )


class QueueLimits(msgspec.Struct, frozen=True):
    """The settings of these names; None is no limit."""

    max_queued_requests: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> QueueLimits:
        """Return the limits of a configuration."""
        return cls(config.max_queued_requests, config.max_num_queued_reqs, config.max_num_queued_tokens)


class QueueGate:
    """Refuses requests beyond `limits`, all samples of a prompt or none, and all texts of a pooled list or none.

    A list counts as one request until its texts wait.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._group_id = ""
        self._reason: str | None = None

    def reason(self, request: EngineRequest, *, num_waiting: int, num_open: int, num_tokens: int) -> str | None:
        """Return why a request is refused, or None.

        Of the `num_open` requests, `num_waiting` have no slot, not even a free one. `num_tokens` tokens of prompts are
        still to be computed.
        """
        if request.sample == 0 or request.group_id != self._group_id:
            self._group_id = request.group_id
            self._reason = self._find_reason(_num_sequences(request), num_waiting, num_open, num_tokens)
        return self._reason

    def _find_reason(self, num_sequences: int, num_waiting: int, num_open: int, num_tokens: int) -> str | None:
        limits = self._limits
        for setting, found, limit, adds in (
            ("max_queued_requests", num_waiting, limits.max_queued_requests, num_sequences),
            ("max_num_queued_reqs", num_open, limits.max_num_queued_reqs, num_sequences),
            # A prompt longer than the limit is accepted while fewer tokens wait.
            ("max_num_queued_tokens", num_tokens, limits.max_num_queued_tokens, 1),
        ):
            if limit is not None and found + adds > limit:
                return str(QueueFullError(setting, found, limit, adds))
        return None


def _num_sequences(request: EngineRequest) -> int:
    """Return how many sequences come with a request, itself included."""
    return 1 if request.pooled else request.sampling.n - request.sample


def pool_exhausted_error(num_tokens: int, capacity: Capacity) -> str:
    """Return the error message for a request that fills the whole KV cache and needs more."""
    return (
        f"the request has reached {num_tokens} tokens and fills the whole KV cache of "
        f"{capacity.num_pages * capacity.page_size} tokens ({capacity.num_pages} pages of {capacity.page_size}); ask "
        "for fewer max_tokens, or raise --max-total-tokens or --mem-fraction-static"
    )


def max_new_tokens(request: EngineRequest, capacity: Capacity) -> int:
    """Return how many tokens a request may produce: what it asks for, within the context length."""
    return min(request.sampling.max_tokens, capacity.max_model_len - len(request.prompt_ids))


class NewTokenRatio:
    """The share of the tokens that running requests may still produce which is kept free for them.

    It starts at min(0.7 c, 1) for a conservativeness c and falls linearly to 0.14 of that over 600 decode steps, since
    most requests end early. A retraction shows that it was too low: it is then set from the observed lengths.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(_INITIAL_RATIO * conservativeness, 1.0)
        self._minimum = min(_MIN_SHARE * self._initial, 1.0)
        self.value = self._initial
        self._decay = (self._initial - self._minimum) / _DECAY_STEPS

    def decay(self, share: float) -> None:
        """Lower the ratio by a decode step of `share` of the decoding requests."""
        self.value = max(self.value - share * self._decay, self._minimum)

    def set_from_survivors(self, survivors: Sequence[Request]) -> None:
        """Set the ratio after a retraction, from the requests that continue."""
        decoded = sum(request.num_planned_outputs for request in survivors)
        most = sum(request.max_new_tokens for request in survivors)
        self._start_at(min(1.0, (decoded + _STEPS_AFTER_RETRACTION * len(survivors)) / (most + 1)))

    def reset(self) -> None:
        """Return to the initial ratio, when no request is open."""
        self._start_at(self._initial)

    def _start_at(self, value: float) -> None:
        # The fall takes 600 steps from any start. At SGLang's fixed pace, a low conservativeness would keep the ratio
        # high for thousands of steps after a retraction, and so retract less than a high one.
        self.value = value
        self._decay = (value - self._minimum) / _DECAY_STEPS


def reserved_tokens(running: Iterable[Request], ratio: float) -> float:
    """Return how many more tokens running requests are expected to produce: `ratio` of the tokens left to each, which
    count up to a limit."""
    return ratio * sum(min(r.max_new_tokens - r.num_planned_outputs, _MAX_RESERVED_TOKENS) for r in running)


def may_start(pages_to_fill: int, available_pages: int, reserved_pages: int, *, nothing_runs: bool) -> bool:
    """Return whether all fill tokens and one page of output fit beside what is reserved for running requests.

    A weaker test would start requests that are retracted a moment later. If nothing else runs, there is nothing to wait
    for, so room for the fill tokens is enough.
    """
    if nothing_runs:
        return pages_to_fill <= available_pages
    return pages_to_fill + 1 + reserved_pages <= available_pages
