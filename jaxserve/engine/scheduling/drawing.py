"""Plans how requests with a grammar get their next tokens: drawn among those allowed, or forced.

Forced tokens are computed together, like a piece of a prompt, or each takes the place of one that would be drawn.
"""

from __future__ import annotations

import dataclasses

from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request
from jaxserve.step_plan import Chunk, Draw

# The most forced tokens of one request that a step computes.
_MAX_RUN = 64


@dataclasses.dataclass
class Drawing:
    """The draws within grammars of one step with their requests, and the requests with a run of forced tokens.

    Until it is known whether runs are computed `one_by_one`, they wait in `forced`, by rank.
    """

    forced: list[list[Request]]
    draws: list[Draw] = dataclasses.field(default_factory=list)
    requests: list[Request] = dataclasses.field(default_factory=list)
    one_by_one: bool = False

    def plan(self, request: Request) -> bool:
        """Plan how a request with a grammar gets its next token; return whether it is a decode of this step then."""
        assert request.slot is not None
        run = request.num_known_tokens - request.num_planned_tokens
        if run > 1 and not self.one_by_one:
            self.forced[request.rank].append(request)
        elif run > 0:
            [token] = request.tokens(request.num_planned_tokens, request.num_planned_tokens + 1)
            self.draws.append(Draw(rank=request.rank, slot=request.slot, token=token))
            self.requests.append(request)
            return True
        elif run == 0 and request.allowed is not None:
            self.draws.append(Draw(rank=request.rank, slot=request.slot, allowed=request.allowed))
            self.requests.append(request)
            request.allowed = None
            request.num_planned_outputs += 1
            return True
        return False

    def run_lengths(self) -> list[list[int]]:
        """Return how many forced tokens a step could compute of each request that has a run, by rank."""
        return [
            [min(request.num_known_tokens - request.num_planned_tokens, _MAX_RUN) for request in forced]
            for forced in self.forced
        ]


def plan_run(rank: Rank, request: Request, length: int, num_forced: int, page_size: int) -> Chunk:
    """Plan at most `length` forced tokens of one of `num_forced` requests, on pages that no other may need."""
    start = request.num_planned_tokens
    if length > (room := -start % page_size):
        spare = rank.num_available_pages - len(rank.decoding) - num_forced
        length = min(length, room + max(0, spare) * page_size + (not room))
    assert request.slot is not None
    state = None if rank.states is None else rank.states.write_output(request, start + length)
    chunk = Chunk(
        request_id=request.request_id,
        slot=request.slot,
        rank=rank.index,
        start=start,
        length=length,
        tokens=request.tokens(start, start + length),
        new_pages=rank.extend(request, start + length),
        logits=1,
        sample=False,
        state=state,
    )
    request.num_planned_tokens = start + length
    return chunk
