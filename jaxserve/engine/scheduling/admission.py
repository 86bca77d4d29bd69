"""Whether a request may come in at all, and whether a waiting one may start now.

It knows sizes, neither the queue nor the pool; all it keeps is the ratio of SGLang's `--schedule-conservativeness`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.api_types import EngineRequest
from jaxserve.engine.scheduling.request import Request
from jaxserve.step_plan import Capacity

_FIRST_RATIO = 0.7
_FLOOR_SHARE = 0.14
_DECAY_STEPS = 600
_STEPS_TO_GO_ON = 20
_MOST_RESERVED = 4096


def refusal(request: EngineRequest, capacity: Capacity) -> str | None:
    """Why a request can never be served within `capacity`, or None."""
    length = len(request.prompt_ids)
    if length == 0:
        return "the prompt is empty; it needs at least one token"
    if length >= capacity.max_model_len:
        return (
            f"the prompt has {length} tokens, which leaves no room for output within the context length of "
            f"{capacity.max_model_len}; shorten the prompt or raise --context-length"
        )
    if -(-length // capacity.page_size) > capacity.num_pages:
        return (
            f"the prompt has {length} tokens, more than the {capacity.num_pages * capacity.page_size} of the whole KV "
            "cache; shorten the prompt or raise --max-total-tokens or --mem-fraction-static"
        )
    return None


def pool_exhausted(num_tokens: int, capacity: Capacity) -> str:
    """The error of a request that has the whole KV cache to itself and needs more."""
    return (
        f"the request has reached {num_tokens} tokens and fills the whole KV cache of "
        f"{capacity.num_pages * capacity.page_size} tokens ({capacity.num_pages} pages of {capacity.page_size}); ask "
        "for fewer max_tokens, or raise --max-total-tokens or --mem-fraction-static"
    )


def max_new_tokens(request: EngineRequest, capacity: Capacity) -> int:
    """How many tokens a request may produce: what it asks for, within the context length."""
    return min(request.sampling.max_tokens, capacity.max_model_len - len(request.prompt_ids))


class NewTokenRatio:
    """Which share of the tokens that running requests may still produce is kept free for them.

    It starts at min(0.7 c, 1) for a conservativeness c, falls linearly to 0.14 of that over 600 decode
    steps, since most requests end early, and is set by what was seen whenever a retraction shows it too low.
    """

    def __init__(self, conservativeness: float) -> None:
        self._first = min(_FIRST_RATIO * conservativeness, 1.0)
        self._floor = min(_FLOOR_SHARE * self._first, 1.0)
        self.value = self._first
        self._decay = (self._first - self._floor) / _DECAY_STEPS

    def decode_step(self) -> None:
        """A decode step has been planned."""
        self.value = max(self.value - self._decay, self._floor)

    def retracted(self, survivors: Sequence[Request]) -> None:
        """Requests were retracted; these go on."""
        decoded = sum(request.num_planned_outputs for request in survivors)
        most = sum(request.max_new_tokens for request in survivors)
        self._start_at(min(1.0, (decoded + _STEPS_TO_GO_ON * len(survivors)) / (most + 1)))

    def reset(self) -> None:
        """Nothing runs or waits any more."""
        self._start_at(self._first)

    def _start_at(self, value: float) -> None:
        # From wherever it starts it takes 600 steps: at SGLang's fixed pace a low conservativeness would keep it high
        # for thousands of steps after a retraction, and so retract less than a high one.
        self.value = value
        self._decay = (value - self._floor) / _DECAY_STEPS


def reserved_tokens(running: Iterable[Request], ratio: float) -> float:
    """What running requests are expected to produce yet: a share of what they may."""
    return ratio * sum(min(r.max_new_tokens - r.num_planned_outputs, _MOST_RESERVED) for r in running)


def may_start(pages_to_fill: int, available_pages: int, reserved_pages: int, *, alone: bool) -> bool:
    """Whether all tokens to fill, and one page of output, fit beside what is reserved for those that run.

    Asking for less would let in what is retracted a moment later. With nothing else running there is nothing to wait
    for, so then the tokens alone are enough.
    """
    if alone:
        return pages_to_fill <= available_pages
    return pages_to_fill + 1 + reserved_pages <= available_pages
