"""An open request in the engine: its only mutable record, owned by the engine's thread.

It counts tokens in three ways. *Planned* tokens are in a step that was handed to the device. *Computed* tokens are in a
step whose result has been committed; the difference is in flight. *Fill* tokens were known to the host when the request
took its slot (the prompt, and after a retraction its output too). They are computed in chunks. After them each step
adds one token, or several if it verifies drafts. Drafts in flight are planned but *unverified*; rejected ones are taken
back. The scheduler makes all decisions.
"""

from __future__ import annotations

import enum

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, TokenEvent, TokenLogprobs, Usage
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.scheduling.grammars import RequestGrammar
from jaxserve.engine.scheduling.state_row import StateRow
from jaxserve.engine.scheduling.thinking import ThinkingCounter


class Phase(enum.Enum):
    """The state of a request; it holds a slot and pages only while RUNNING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence. `arrival` orders requests; `sampling` always has a seed; a higher `priority` comes first.

    `pages` are by KV group. Of the groups with a window, the first `passed[group]` pages have been given up.
    The first `num_shared_pages` of its pages belong to the prefix cache and end at `node`, which the request has
    locked; the others are its own. A draft model has read the first `num_read_tokens` of its planned tokens.
    `acceptance` is the share of draft tokens that are accepted, None before the first.
    A `grammar` constrains its output: `allowed` are the tokens that may be drawn next, None before they are known.
    Without one, `thinking` counts its reasoning; None if that has no bound, or can't come any more. No more than
    `pause_at` outputs are planned before more of them are known: its reasoning may have to end there.
    `queue_seconds` is None before the first start, and again once it was reported. Steps of its `micro_batch` decode
    it, once its prompt is planned. In a model with states, it has a `state` while it runs. A `pooled` request ends with
    its prompt; if it `wants_all_tokens`, none of these may be cached.
    """

    __slots__ = (
        "acceptance",
        "allowed",
        "arrival",
        "arrived_at",
        "cache_salt",
        "client",
        "grammar",
        "greedy",
        "group_id",
        "is_prompt_counted",
        "max_new_tokens",
        "micro_batch",
        "min_tokens",
        "node",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_fill_tokens",
        "num_planned_outputs",
        "num_planned_tokens",
        "num_prompt_tokens",
        "num_read_tokens",
        "num_shared_pages",
        "num_starts",
        "num_unverified_tokens",
        "output_ids",
        "pages",
        "passed",
        "pause_at",
        "phase",
        "pooled",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "queue_index",
        "queue_seconds",
        "rank",
        "request_id",
        "rotation_length",
        "sample",
        "sampling",
        "slot",
        "state",
        "stop_ids",
        "thinking",
        "wants_all_tokens",
        "wants_logprobs",
    )

    def __init__(
        self,
        source: EngineRequest,
        *,
        sampling: SamplingParams,
        arrival: int,
        arrived_at: float,
        max_new_tokens: int,
        priority: int = 0,
        rotation_length: int | None = None,
        grammar: RequestGrammar | None = None,
        thinking: ThinkingCounter | None = None,
        pools_all_tokens: bool = False,
    ) -> None:
        self.request_id = source.request_id
        self.prompt_ids = source.prompt_ids
        self.stop_ids = source.stop_ids
        self.group_id = source.group_id
        self.sample = source.sample
        self.client = source.client
        self.pooled = source.pooled
        self.wants_all_tokens = source.pooled and pools_all_tokens
        self.sampling = sampling
        self.arrival = arrival
        self.arrived_at = arrived_at
        self.priority = priority
        self.cache_salt = source.namespace
        self.rotation_length = rotation_length
        self.max_new_tokens = max_new_tokens
        self.min_tokens = sampling.min_tokens
        self.greedy = sampling.greedy
        self.grammar = grammar
        self.thinking = thinking
        self.pause_at = max_new_tokens if thinking is None else min(max_new_tokens, thinking.num_free)
        self.allowed: bytes | None = None
        self.wants_logprobs = sampling.logprobs is not None
        # The first token has no log probability, as nothing precedes it. None if not requested, or once delivered.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if sampling.prompt_logprobs is None else [None]

        self.phase = Phase.WAITING
        self.output_ids: list[int] = []
        self.num_prompt_tokens = len(source.prompt_ids)
        self.num_cached_tokens: int | None = None
        self.num_shared_pages = 0
        self.num_starts = 0
        self.is_prompt_counted = False
        self.node: RadixNode | None = None
        self.queue_seconds: float | None = None
        self.queue_index = 0
        self.num_fill_tokens = self.num_prompt_tokens
        self.num_planned_tokens = 0
        self.num_computed_tokens = 0
        self.num_planned_outputs = 0
        self.num_unverified_tokens = 0
        self.num_read_tokens = 0
        self.acceptance: float | None = None
        self.rank = 0
        self.micro_batch = 0
        self.slot: int | None = None
        self.state: StateRow | None = None
        self.pages: list[list[int]] = [[]]
        self.passed: list[int] = [0]

    @property
    def num_known_tokens(self) -> int:
        """The number of prompt and output tokens that the host has seen."""
        return self.num_prompt_tokens + len(self.output_ids)

    @property
    def num_certain_tokens(self) -> int:
        """The number of planned tokens without drafts that may yet be rejected."""
        return self.num_planned_tokens - self.num_unverified_tokens

    def plan_drafts(self, count: int) -> None:
        """Plan that the next decode verifies `count` draft tokens too."""
        self.num_planned_tokens += count
        self.num_planned_outputs += count
        self.num_unverified_tokens += count

    def commit_drafts(self, count: int, accepted: int) -> None:
        """Count the accepted ones of `count` draft tokens; the others were never planned."""
        self.num_unverified_tokens -= count
        self.num_planned_tokens -= count - accepted
        self.num_planned_outputs -= count - accepted
        self.num_read_tokens = max(0, self.num_read_tokens - (count - accepted))
        if self.state is not None:
            self.state.commit_drafts(count, accepted)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether chunks of the prompt still have to compute log probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        """The token counts so far."""
        return Usage(self.num_prompt_tokens, len(self.output_ids), self.num_cached_tokens or 0)

    @property
    def num_reusable_tokens(self) -> int:
        """The number of fill tokens that may come from the prefix cache: not the last one, from which the next token is
        drawn, and none if something is computed of all."""
        return 0 if self.wants_all_tokens or self.needs_prompt_logprobs else self.num_fill_tokens - 1

    @property
    def fill_tokens(self) -> list[int]:
        """The tokens to compute in chunks."""
        return self.prompt_ids if not self.output_ids else self.tokens(0, self.num_fill_tokens)

    @property
    def is_long(self) -> bool:
        """Whether it is rotated as a sequence of more than `rotation_length` tokens, since its start."""
        return self.rotation_length is not None and self.num_fill_tokens > self.rotation_length

    @property
    def namespace(self) -> tuple[str, bool]:
        """The namespace of its cached prefixes."""
        return self.cache_salt, self.is_long

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens of positions `start` to `end`, over prompt and output."""
        prompt = self.num_prompt_tokens
        if end <= prompt:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:prompt] + self.output_ids[max(start - prompt, 0) : end - prompt]

    @property
    def awaits_allowed(self) -> bool:
        """Whether all its known tokens are planned, and its next one needs to know which tokens are allowed.

        Log probabilities of the prompt come with its first token, so they must be there.
        """
        return (
            self.phase is Phase.RUNNING
            and self.allowed is None
            and (self.num_planned_tokens == self.num_known_tokens or len(self.output_ids) >= self.max_new_tokens)
            and not self.needs_prompt_logprobs
        )

    def take_first_report(self) -> tuple[list[TokenLogprobs | None] | None, float | None]:
        """Return what only the first event has, log probabilities of the prompt and the queue time; then None."""
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        queue_seconds, self.queue_seconds = self.queue_seconds, None
        return prompt_logprobs, queue_seconds

    def certain_logprobs(self, tokens: list[int]) -> list[TokenLogprobs]:
        """Return the log probabilities of tokens that had to come: no others were possible."""
        count = min(self.sampling.logprobs or 0, 1)
        return [TokenLogprobs(token, 0.0, [token][:count], [0.0][:count]) for token in tokens]

    def add_prompt_logprobs(self, found: list[TokenLogprobs]) -> None:
        """Add the prompt log probabilities of a chunk, without an entry for the token after the prompt."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.extend(found[: self.num_prompt_tokens - len(self.prompt_logprobs)])

    def add_outputs(self, tokens: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """Add tokens to the output, up to one that ends it.

        Returns those added, why the output ends with the last of them, and which stop token that is.
        """
        outputs = self.output_ids
        for count, token in enumerate(tokens, 1):
            outputs.append(token)
            if token in self.stop_ids and len(outputs) > self.min_tokens:
                return tokens[:count], FinishReason.STOP, token
            if len(outputs) >= self.max_new_tokens:
                return tokens[:count], FinishReason.LENGTH, None
        return tokens, None, None

    def passes(self, token: int) -> bool:
        """Count the next token of an output whose reasoning is counted, if nothing but the count changes; else return
        False."""
        counter = self.thinking
        assert counter is not None
        if not counter.passes(token):
            return False
        if not counter.is_inside and self.pause_at < self.max_new_tokens:
            self.pause_at += 1
        return True

    def add_counted_outputs(self, drawn: list[int]) -> tuple[list[int], list[int], FinishReason | None, int | None]:
        """Add drawn tokens to an output whose reasoning is counted, then the tokens that must end the reasoning.

        Returns the tokens added of both, why the output ends with the last of them, and which stop token that is.
        Tokens that were drawn though nothing of the reasoning was left are dropped.
        """
        counter = self.thinking
        assert counter is not None
        closing, reason, stop_id = list[int](), None, None
        if counter.is_used_up:  # from the start
            drawn = []
        drawn, reason, stop_id = self.add_outputs(drawn)
        counter.push(drawn)
        if counter.is_used_up and reason is None:
            closing, reason, stop_id = self.add_outputs(list(counter.closing()))
            counter.close()
        if counter.is_over:
            self.thinking = None
        self.pause_at = min(self.max_new_tokens, len(self.output_ids) + counter.num_free)
        return drawn, closing, reason, stop_id

    def reset_progress(self) -> None:
        """Return to WAITING with no computed tokens; at the next start all known tokens are fill tokens."""
        self.phase = Phase.WAITING
        self.num_planned_tokens = 0
        self.num_computed_tokens = 0
        self.num_planned_outputs = len(self.output_ids)
        self.num_unverified_tokens = 0
        self.num_fill_tokens = self.num_known_tokens
        if self.needs_prompt_logprobs:
            self.prompt_logprobs = [None]

    def last_event(
        self,
        reason: FinishReason,
        token_ids: list[int],
        *,
        stop_id: int | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        pooled: bytes | None = None,
    ) -> TokenEvent:
        """Return the event that ends the request, with as many of `logprobs` as there are `token_ids`."""
        return TokenEvent(
            self.request_id,
            token_ids,
            finish_reason=reason,
            stop_id=stop_id,
            logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            prompt_logprobs=None if self.needs_prompt_logprobs else self.prompt_logprobs,
            usage=self.usage,
            error=error,
            queue_seconds=self.queue_seconds,
            pooled=pooled,
        )
