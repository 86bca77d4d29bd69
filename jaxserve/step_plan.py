"""The interface between the scheduler and the device: the plan of a step, its result, and the executor that runs it.

The engine and the runtime both import this module, and neither imports the other. A plan holds plain integers: a test
can build it, print it or send it to another process.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Literal, Protocol

import msgspec

from jaxserve.api_types import SamplingParams, StageTimes, TokenLogprobs

StepKind = Literal["decode", "verify", "mixed", "prompt_logprobs", "encode"]
"""The kinds of steps: with decodes alone, some of which may verify drafts; with chunks of prompts; with log
probabilities of prompts; and of a model without a KV cache, with whole texts."""


class StateWrite(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk writes the state of its sequence, in a model that has states.

    From this chunk on, the state is in row `target` of the pool. Row `snapshot`, if it isn't None, gets the state after
    the first `snapshot_tokens` tokens: a multiple of `Capacity.state_unit` that this chunk computes.
    """

    target: int
    snapshot: int | None = None
    snapshot_tokens: int = 0


class SlotOpen(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Assigns a slot to a request, of whose tokens the first `num_cached_tokens` are cached.

    `cached_pages` are the pages of these tokens by KV group; of a group with a window, only the last ones.
    `output_ids` are the tokens that it produced before it was retracted; penalties count them as output. Drafts come
    from the tokens of requests with the same `namespace`. If it is `constrained` by a grammar, steps draw no token
    for it: a `Draw` does.

    In a model with states, `state` is the row of the pool that has the state after the cached tokens, None if there are
    none. Pages of tokens after these may be cached, too: they are computed again for the state.
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
    namespace: str = ""
    constrained: bool = False
    state: int | None = None


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request to compute in a step: `length` of them, from position `start` on.

    `tokens` is None for a decode: its token is the slot's last one, which may be on the device only. If its length is
    not 1, draft tokens of the device follow, to be verified. While drafts of an earlier step are being verified,
    `start` is an upper bound: the device knows how many were accepted. `new_pages`, by KV group, are appended to the
    slot's page tables before the chunk runs: as many in each group, for the same tokens; the last page is that of the
    chunk's last token. `logits` is the number of
    trailing positions that need logits: 0 (more prefill follows), 1 (decode, end of prefill) or `length` (drafts to
    verify, log probabilities of the prompt). `sample` says whether a token is drawn after the last position. `target`
    is the prompt token that follows the chunk, if log probabilities of the prompt are wanted. `state` says where the
    state of the sequence is written, if not where it was before. A `pooled` chunk is the last one of a pooled request:
    the vector of its sequence is wanted. Tokens from `second_start` on are those of the second text of a pair.
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
    state: StateWrite | None = None
    pooled: bool = False
    second_start: int | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted."""
        return self.target is not None or (self.tokens is not None and self.logits > 1)


PageCopy = tuple[int, int, int, int]
"""The copy of a page of a rank, as (KV group, rank, source, target). The group after the last one has the states, of
which a row counts as a page."""


class DraftRead(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Tokens of a slot that a draft model reads before a step: `length` of them, the first `back` tokens before the
    last one of the sequence, as the device knows it when the step begins."""

    rank: int
    slot: int
    back: int
    length: int


class Draw(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The next token of a slot that a grammar constrains: `token`, or if it is None, one to draw.

    `allowed` are the tokens that may be drawn, a bit for each, the first in the lowest bit of the first byte; tokens
    beyond its end are not allowed.
    """

    rank: int
    slot: int
    token: int | None = None
    allowed: bytes = b""


class StepPlan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step of all ranks: slots to open, and chunks to run, decodes first.

    Before the chunks run, the tokens of `draws` are drawn; a plan may have nothing else. The `num_forced` chunks after
    the decodes are tokens that a grammar left no choice for.

    The first `num_decodes` chunks are decodes, those of a rank sorted by length, with `num_drafts` drafts to verify.
    Chunks that begin their sequence, at position 0, come last. Before the chunks run, a draft model reads the tokens of
    `draft_reads`, and makes drafts of `draft_steps` tokens for the chunks that verify any. `greedy` allows the program
    that has no sampler. Before anything else, pages are copied to slots of host memory, in the order of `saves`, and
    then from host memory, in the order of `loads`.
    """

    opens: list[SlotOpen]
    chunks: list[Chunk]
    num_decodes: int
    greedy: bool
    num_drafts: int = 0
    draws: list[Draw] = []
    num_forced: int = 0
    draft_reads: list[DraftRead] = []
    draft_steps: int = 0
    saves: list[PageCopy] = []
    loads: list[PageCopy] = []

    @property
    def kind(self) -> StepKind:
        """The kind of step, which decides what kind of program computes it."""
        if self.num_decodes == len(self.chunks):
            return "verify" if self.num_drafts else "decode"
        if any(chunk.wants_prompt_logprobs for chunk in self.chunks[self.num_decodes :]):
            return "prompt_logprobs"
        return "mixed"

    def size(self, num_ranks: int) -> int:
        """Return the size of the fullest rank, by which all ranks choose their program: rows if all decode without
        drafts, else tokens."""
        return self.max_rank_rows(num_ranks) if self.kind == "decode" else self.max_rank_tokens(num_ranks)

    def max_rank_rows(self, num_ranks: int) -> int:
        """Return the largest number of chunks of a rank."""
        if num_ranks == 1:
            return len(self.chunks)
        return max(Counter(chunk.rank for chunk in self.chunks).values(), default=0)

    def max_rank_tokens(self, num_ranks: int) -> int:
        """Return the largest number of tokens of a rank."""
        if num_ranks == 1:
            return sum(chunk.length for chunk in self.chunks)
        tokens = [0] * num_ranks
        for chunk in self.chunks:
            tokens[chunk.rank] += chunk.length
        return max(tokens)


class StepResult(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The results of a step, by the index of the chunk in its plan.

    `tokens[i]` are the tokens that chunk i drew, none if its `sample` is False. If the request wants them,
    `logprobs[i]` are the log probabilities of these tokens, and `prompt_logprobs[i]` those of the prompt tokens that
    follow each position of the chunk. With speculation, `drafts[i]` says how many draft tokens were compared
    with drawn ones, and how many of them, from the first on, were the same. A decode of length 1 compares one too.
    `pooled[i]` is the vector of a pooled chunk, in float32.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    drafts: list[tuple[int, int]] = []
    pooled: dict[int, bytes] = {}


class DrawResult(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a plan's draws drew, by index, and their log probabilities if the request wants them."""

    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = {}


class WindowGroup(msgspec.Struct, frozen=True):
    """The pages of a KV group whose layers see only the last `window` positions of a query, its own included."""

    num_pages: int
    window: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that the programs of a deployment can hold, per rank; the scheduler plans within them.

    `num_pages` counts pages of the first KV group, which keeps whole sequences; `window_groups` are the others.
    `decode_buckets` are row counts of decode steps, `token_buckets` token counts of mixed steps, both ascending; no
    step may exceed the largest. Decode buckets up to `fine_decode_rows` are finely spaced. `prompt_logprob_tokens`
    bounds the tokens of a step that computes log probabilities of prompts. `verify_buckets` are token counts of steps
    that verify drafts, of at most `max_drafts` tokens each; there are none without speculation. With a draft model,
    `draft_buckets` are row counts of steps that make drafts, and `draft_read_buckets` token counts of those that read
    tokens; drafting itself reads the last `max_unread` tokens of a sequence. A sequence of more than `rotation_length`
    tokens has another rotary embedding than a shorter one, from its first token on. Programs that draw within a
    grammar have at least `smallest_draw` rows. `vocab_size` is a multiple of the number of shards: it counts the
    model's token ids, and the padding of the last shards. With `num_stages` pipeline stages, as many steps compute at
    once, each with decodes of its own. In a model that keeps a state for each sequence, a pool has `num_states` of
    them, and a cached prefix can end at multiples of `state_unit` tokens; else both are 0. After
    a step, the state of a sequence is the one after a multiple of `state_block` tokens: see `folded_tokens`.

    Pooled requests get vectors of `pooled_size` numbers, 0 if there are none. With `pools_all_tokens`, these need the
    hidden states of all their tokens, so that none may come from the prefix cache. With `pools_by_token`, each token of
    a text gets such a vector. Without `generates`, only programs
    of mixed steps exist, and they draw nothing. A model that `encodes` has no pages, and only programs for whole texts,
    of as many tokens as `token_buckets` say.
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
    rotation_length: int | None = None
    window_groups: tuple[WindowGroup, ...] = ()
    verify_buckets: tuple[int, ...] = ()
    max_drafts: int = 0
    draft_buckets: tuple[int, ...] = ()
    draft_read_buckets: tuple[int, ...] = ()
    max_unread: int = 2
    smallest_draw: int = 1
    vocab_size: int = 0
    num_stages: int = 1
    num_states: int = 0
    state_unit: int = 0
    state_block: int = 16
    pooled_size: int = 0
    pools_all_tokens: bool = False
    pools_by_token: bool = False
    generates: bool = True
    encodes: bool = False

    def folded_tokens(self, certain: int) -> int:
        """Return after how many tokens a sequence has its state, if `certain` are computed and can't be rejected.

        In a step that verifies drafts of a sequence, these are the tokens before the step and one more.
        """
        return certain // self.state_block * self.state_block

    def buckets(self, kind: StepKind) -> tuple[int, ...]:
        """Return the sizes of the programs of a kind of step: rows of decodes, else tokens."""
        if kind == "decode":
            return self.decode_buckets
        if kind == "verify":
            return self.verify_buckets
        return (self.prompt_logprob_tokens,) if kind == "prompt_logprobs" else self.token_buckets

    def bucket(self, kind: StepKind, size: int) -> int:
        """Return the smallest program of a kind that holds `size`; the caller makes sure that one does."""
        buckets = self.buckets(kind)
        return buckets[bisect.bisect_left(buckets, size)]

    @property
    def verifies_beside_prompts(self) -> bool:
        """Whether steps that compute prompts verify drafts, too. With a draft model, none do."""
        return bool(self.verify_buckets) and not self.draft_buckets

    def max_drawn(self, tokens: int) -> int:
        """Return how many tokens a mixed step of `tokens` tokens draws at most on a rank."""
        rows = min(self.num_slots, tokens)
        return max(rows, min(tokens, self.verify_buckets[-1])) if self.verifies_beside_prompts else rows

    @property
    def pages_by_group(self) -> tuple[int, ...]:
        """The number of pages of each KV group."""
        if self.encodes:
            return ()
        return (self.num_pages, *(group.num_pages for group in self.window_groups))


class Executor(Protocol):
    """Runs plans in the order they are dispatched."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def compiles_after_ready(self) -> int: ...

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Return how many tokens each expert of each layer that has experts has computed."""
        ...

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Return the times of the pipeline stages so far, () if there is only one."""
        ...

    def dispatch(self, plan: StepPlan) -> object:
        """Start the plan's step and return a handle without waiting for it."""
        ...

    def collect_draws(self, handle: object) -> DrawResult:
        """Wait for the draws of a dispatched step, which precede it, and return what they drew."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for a dispatched step and return what it produced."""
        ...
