"""What the scheduler asks of the device for one step, and what comes back.

Both wings know this module and nothing of each other. A plan is plain integers: it can be built by a test, printed,
or sent to another process.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import msgspec

from jaxserve.api_types import SamplingParams, TokenLogprobs


class SlotOpen(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A request takes a slot. `cached_pages`, by KV group, hold the first `num_cached_tokens` of its tokens.

    `output_ids` are tokens it had produced before it was retracted; penalties count them as output.
    """

    slot: int
    rank: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    sample: int
    prompt_ids: list[int]
    output_ids: list[int]
    cached_pages: tuple[tuple[int, ...], ...] = ((),)
    num_cached_tokens: int = 0
    adapter: int = 0


class Chunk(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`length` tokens of one request from position `start` on; a decode is a chunk of length 1 whose `tokens` is None.

    `tokens` None means the slot's last token, which may still be on the device only. `new_pages`, by KV group, are
    appended to the slot's page table before the chunk runs. `logits` is how many trailing positions want them: 0 (more
    prefill follows), 1 (decode, end of prefill), `length` (log probabilities of the prompt). `sample` says whether a
    token is drawn after the last position. `target` is the token that follows the chunk, where the prompt's log
    probabilities are wanted and the prompt goes on.
    """

    request_id: str
    slot: int
    rank: int
    start: int
    length: int
    tokens: list[int] | None
    new_pages: tuple[tuple[int, ...], ...]
    logits: int
    sample: bool
    target: int | None = None


Copy = tuple[int, int, int]
"""A page that is copied, with the rank it belongs to: (rank, from, to)."""


class StepPlan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step of all ranks: slots that open, chunks to run (decodes first), slots that close before it, as (rank,
    slot). `greedy` allows the program that has no sampler.

    Before all of it, pages are copied to slots of host memory, in the order of `saves`, and after that from there, in
    that of `loads`.
    """

    opens: list[SlotOpen]
    chunks: list[Chunk]
    closes: list[tuple[int, int]]
    num_decodes: int
    greedy: bool
    saves: list[Copy] = []
    loads: list[Copy] = []

    def most_rows(self, num_ranks: int) -> int:
        """Chunks of the rank that has most of them: all ranks run the program that holds it."""
        if num_ranks == 1:
            return len(self.chunks)
        return max(Counter(chunk.rank for chunk in self.chunks).values(), default=0)

    def most_tokens(self, num_ranks: int) -> int:
        """Tokens of the rank that has most of them."""
        if num_ranks == 1:
            return sum(chunk.length for chunk in self.chunks)
        tokens = [0] * num_ranks
        for chunk in self.chunks:
            tokens[chunk.rank] += chunk.length
        return max(tokens)


class StepResult(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a step produced, aligned with the chunks of its plan.

    `tokens[i]` are the tokens chunk i drew (none where `sample` was False). `logprobs[i]` are theirs when the request
    wants them; `prompt_logprobs[i]` those of the tokens that follow each position of the chunk.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the programs of a deployment can hold; the scheduler plans within it.

    `decode_buckets` are row counts, `token_buckets` token counts of mixed steps, each ascending; a step fits into the
    largest. Up to `fine_decode_rows` decode buckets are finely spaced. `prompt_logprob_tokens` bounds a step that
    computes log probabilities of prompts. All of it is per rank, of which there are `num_ranks`.
    """

    num_slots: int
    num_pages: int
    page_size: int
    max_model_len: int
    decode_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    prompt_logprob_tokens: int
    num_ranks: int = 1
    fine_decode_rows: int = 2**31 - 1


class Executor(Protocol):
    """Runs plans in the order they are dispatched."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def compiles_after_ready(self) -> int: ...

    def dispatch(self, plan: StepPlan) -> object:
        """Start the plan's step and return a handle without waiting for it."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for a dispatched step and return what it produced."""
        ...
