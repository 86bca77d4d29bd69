"""A request while the engine works on it: the only mutable record of it, owned by the engine's thread.

It counts tokens three ways. *Planned* ones are in a step that was handed to the device, *computed* ones in a step whose
result has been committed; the two differ by what is in flight. *Fill* tokens are those the host knew when the request
took its slot (the prompt, and after a retraction its output too): they are computed in chunks; from then on each step
adds one. It never decides anything: the scheduler does.
"""

from __future__ import annotations

import enum

from jaxserve.api_types import EngineRequest, SamplingParams, TokenLogprobs, Usage
from jaxserve.engine.kv_cache.radix_node import Node


class Phase(enum.Enum):
    """Where a request stands; it holds a slot and pages only while RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence. `pages` are by KV group; `arrival` orders requests; `sampling` always has a seed.

    The first `num_shared_pages` of its pages are the prefix cache's and end at `node`, which it has locked; the others
    are its own. `queue_seconds` is None until it has started once, and again when that was told.
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "client",
        "greedy",
        "group_id",
        "max_new_tokens",
        "min_tokens",
        "namespace",
        "node",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_fill_tokens",
        "num_planned_outputs",
        "num_planned_tokens",
        "num_prompt_tokens",
        "num_shared_pages",
        "num_starts",
        "output_ids",
        "pages",
        "phase",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "queue_seconds",
        "rank",
        "request_id",
        "sample",
        "sampling",
        "slot",
        "stop_ids",
        "turn",
        "wants_logprobs",
    )

    def __init__(
        self, source: EngineRequest, *, sampling: SamplingParams, arrival: int, arrived_at: float, max_new_tokens: int
    ) -> None:
        self.request_id = source.request_id
        self.prompt_ids = source.prompt_ids
        self.stop_ids = source.stop_ids
        self.group_id = source.group_id
        self.sample = source.sample
        self.client = source.client
        self.sampling = sampling
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.priority = source.priority
        self.namespace = source.namespace
        self.max_new_tokens = max_new_tokens
        self.min_tokens = sampling.min_tokens
        self.greedy = sampling.greedy
        self.wants_logprobs = sampling.logprobs is not None
        # Nothing precedes the first token. Set to None once delivered, or when nobody asked.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if sampling.prompt_logprobs is None else [None]

        self.phase = Phase.WAITING
        self.output_ids: list[int] = []
        self.num_prompt_tokens = len(source.prompt_ids)
        self.num_cached_tokens: int | None = None
        self.num_shared_pages = 0
        self.num_starts = 0
        self.node: Node | None = None
        self.queue_seconds: float | None = None
        self.turn = 0
        self.num_fill_tokens = self.num_prompt_tokens
        self.num_planned_tokens = 0
        self.num_computed_tokens = 0
        self.num_planned_outputs = 0
        self.rank = 0
        self.slot: int | None = None
        self.pages: list[list[int]] = [[]]

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens the host has seen."""
        return self.num_prompt_tokens + len(self.output_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether chunks of the prompt still have to bring log probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(self.num_prompt_tokens, len(self.output_ids), self.num_cached_tokens or 0)

    @property
    def num_reusable_tokens(self) -> int:
        """How many fill tokens may come from the prefix cache: not the last, from which the next token is drawn, and
        none where log probabilities of all are wanted."""
        return 0 if self.needs_prompt_logprobs else self.num_fill_tokens - 1

    @property
    def fill_tokens(self) -> list[int]:
        """The tokens that are computed in chunks."""
        return self.prompt_ids if not self.output_ids else self.tokens(0, self.num_fill_tokens)

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens of positions `start` to `end`, over prompt and output."""
        prompt = self.num_prompt_tokens
        if end <= prompt:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:prompt] + self.output_ids[max(start - prompt, 0) : end - prompt]

    def take_prompt_logprobs(self, found: list[TokenLogprobs]) -> None:
        """Add those of a chunk, which say nothing of the token after the prompt."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.extend(found[: self.num_prompt_tokens - len(self.prompt_logprobs)])

    def start_over(self) -> None:
        """Forget what the device has computed: the next time it runs, all known tokens are filled in again."""
        self.phase = Phase.WAITING
        self.num_planned_tokens = 0
        self.num_computed_tokens = 0
        self.num_planned_outputs = len(self.output_ids)
        self.num_fill_tokens = self.num_known_tokens
        if self.needs_prompt_logprobs:
            self.prompt_logprobs = [None]
