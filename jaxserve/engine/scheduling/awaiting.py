"""Requests that wait until it is known which tokens their grammars allow next."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.engine.scheduling.grammars import Allowed, Grammars, RequestGrammar
from jaxserve.engine.scheduling.request import Phase, Request

# A step waits for grammars while the one before still runs: about half as long as a step takes, in these limits.
_LEAST_WAIT, _MOST_WAIT = 0.005, 0.05


class AwaitingRequests:
    """Requests whose grammars are followed by `grammars`, until `take` returns them. It is false if there are none."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._awaiting: dict[str, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._awaiting)

    def add(self, request: Request) -> None:
        """Begin with the grammar of a new request."""
        self._awaiting[request.request_id] = request
        self._grammars.submit([_grammar_of(request)])

    def push(self, drawn: Iterable[tuple[Request, int]]) -> None:
        """Follow the tokens that were drawn for requests."""
        pushed = []
        for request, token in drawn:
            self._awaiting[request.request_id] = request
            if _grammar_of(request).push(token):
                pushed.append(_grammar_of(request))
        self._grammars.submit(pushed)

    def take(self, step_seconds: float, *, idle: bool) -> list[tuple[Request, Allowed]]:
        """Return the requests that can go on, and what their grammars allow. Waits a moment for quick grammars.

        If the device is `idle`, it waits for slow ones too, so that the caller needn't ask again at once.
        """
        waiting = [_grammar_of(request) for request in self._awaiting.values() if request.awaits_allowed]
        seconds = min(max(_LEAST_WAIT, step_seconds / 2), _MOST_WAIT)
        self._grammars.wait(waiting, seconds, also_slow=idle)
        found = []
        for request in list(self._awaiting.values()):
            allowed = _grammar_of(request).next() if request.awaits_allowed else None
            if allowed is not None:
                found.append((request, allowed))
            if allowed is not None or request.phase is Phase.FINISHED:
                del self._awaiting[request.request_id]
        return found

    def release(self, request: Request) -> None:
        """Take back the grammar of a request that has ended."""
        self._grammars.release(_grammar_of(request))


def _grammar_of(request: Request) -> RequestGrammar:
    assert request.grammar is not None
    return request.grammar
