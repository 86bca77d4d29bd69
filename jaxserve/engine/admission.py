"""Whether a request may come in at all, and whether a waiting one may start now.

Pure functions of sizes: they change nothing and know neither the queue nor the pool.
"""

from __future__ import annotations

from jaxserve.api_types import EngineRequest
from jaxserve.step_plan import Capacity


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


def may_start(pages_to_fill: int, spare_pages: int, *, alone: bool) -> bool:
    """Whether all tokens to fill, and one page of output, fit into the pages that are free.

    Asking for less would let in what is retracted a moment later. With nothing else running there is nothing to wait
    for, so then the tokens alone are enough.
    """
    return pages_to_fill + (0 if alone else 1) <= spare_pages
