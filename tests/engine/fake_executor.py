"""A fake executor: its device is a few dictionaries, and its model is a hash.

The next token is a hash of every token so far, read back through the slot's own page table from the pages as they are
now. So a wrong page, position, slot, order or token in a plan gives wrong tokens, and a page that was freed too
early shows too. Of a KV group with a window, it reads only what the queries of a step see, and mixes in what differs.
Its state comes only from plans, and it checks each plan against `Capacity`. A sequence that starts with more tokens
than `rotation_length` writes other values into its pages, which only such sequences may read. With pipeline stages,
it also checks for which tokens they wait. A state is the values of the tokens that it was made of, so a step fails if
it reads another row than that of its own tokens, or one that was written since.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import Counter
from collections.abc import Sequence

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, StageTimes, TokenLogprobs
from jaxserve.engine.scheduling.grammars import Allowed, RequestGrammar
from jaxserve.engine.scheduling.thinking import ThinkingCounter
from jaxserve.step_plan import Capacity, Chunk, Draw, DrawResult, PageCopy, SlotOpen, StepPlan, StepResult
from tests.grammars import first_allowed, follow
from tests.thinking import is_used_up

VOCAB = 64


def next_token(tokens: Sequence[int], num_outputs: int, sampling: SamplingParams, stop_ids: Sequence[int]) -> int:
    """Return the model's next token after `tokens`, of which the last `num_outputs` are output."""
    seed = f"{list(tokens)} {num_outputs} {sampling.seed if sampling.temperature else None}"
    token = zlib.crc32(seed.encode()) % VOCAB
    while num_outputs < sampling.min_tokens and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


def logprobs_of(tokens: Sequence[int], token: int) -> TokenLogprobs:
    """Return the log probabilities of `token` after `tokens`."""
    return TokenLogprobs(token, -float(zlib.crc32(f"{list(tokens)} {token}".encode()) % 1000), [token], [-1.0])


@dataclasses.dataclass
class Expected:
    """The result of a request that runs alone."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_id: int | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    pooled: bytes | None = None


def vector_of(tokens: Sequence[int]) -> bytes:
    """Return the vector of a sequence: one number, which is finite without this bit of its exponent."""
    return (zlib.crc32(f"vector {list(tokens)}".encode()) & ~(1 << 30)).to_bytes(4, "little")


def run_alone(request: EngineRequest, max_model_len: int) -> Expected:
    """Compute one request alone, in full at every step (its sampling has a seed, or is greedy)."""
    if request.pooled:
        return Expected([], FinishReason.STOP, None, None, None, vector_of(request.prompt_ids))
    sampling, tokens = request.sampling, list(request.prompt_ids)
    outputs: list[int] = []
    logprobs: list[TokenLogprobs] = []
    reason, stop_id = FinishReason.LENGTH, None
    grammar = _grammar_of(request)
    forced, num_closings = list[int](), 0
    while len(outputs) < sampling.max_tokens and len(tokens) < max_model_len:
        found = _allowed(grammar) if grammar is not None else None
        if found is not None and found.complete:
            reason = FinishReason.STOP
            break
        budget = request.thinking
        if budget is not None and grammar is None and not forced and is_used_up(budget, outputs):
            forced = list(budget.closings[min(num_closings, len(budget.closings) - 1)])
            num_closings += 1
        token = next_token(tokens, len(outputs), sampling, request.stop_ids)
        if grammar is not None and found is not None:
            token = first_allowed(token, found.tokens, VOCAB)
            if grammar.push(token):
                follow(grammar)
        if forced:
            token = forced.pop(0)
            count = min(sampling.logprobs or 0, 1)
            logprobs.append(TokenLogprobs(token, 0.0, [token][:count], [0.0][:count]))
        else:
            logprobs.append(logprobs_of(tokens, token))
        tokens.append(token)
        outputs.append(token)
        if token in request.stop_ids and len(outputs) > sampling.min_tokens:
            reason, stop_id = FinishReason.STOP, token
            break
    if grammar is not None and reason is FinishReason.LENGTH and _allowed(grammar).complete:
        reason = FinishReason.STOP
    prompt = request.prompt_ids
    return Expected(
        token_ids=outputs,
        finish_reason=reason,
        stop_id=stop_id,
        logprobs=None if sampling.logprobs is None else logprobs,
        prompt_logprobs=None
        if sampling.prompt_logprobs is None
        else [None, *(logprobs_of(prompt[:i], prompt[i]) for i in range(1, len(prompt)))],
    )


def _grammar_of(request: EngineRequest) -> RequestGrammar | None:
    """Return the grammar of a request, followed one by one."""
    if not request.grammar:
        return None
    sampling = request.sampling
    grammar = RequestGrammar(
        request.grammar,
        stop_ids=request.stop_ids,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        one_by_one=True,
    )
    if request.thinking is not None:
        grammar.thinking = ThinkingCounter(request.thinking)
    follow(grammar)
    return grammar


def _allowed(grammar: RequestGrammar) -> Allowed:
    found = grammar.next()
    assert found is not None
    assert found.error is None
    return found


@dataclasses.dataclass
class _Handle:
    result: StepResult
    drawn: DrawResult


@dataclasses.dataclass
class _Slot:
    opened: SlotOpen
    tables: list[list[int]]
    length: int
    num_outputs: int
    last_token: int | None = None
    hidden: list[int] | None = None  # what the last step saw, if a grammar constrains the slot
    rotation: int = 0  # what is added to the values of its tokens
    # The last step with a part of its prompt, then those with its decodes; of collected ones, at most one
    steps: list[int] = dataclasses.field(default_factory=list)
    # Where its state is, and after how many tokens; the row that it reads first may belong to a snapshot
    row: int | None = None
    folded: int = 0
    owns_row: bool = False


class FakeExecutor:
    """Runs each plan when it is dispatched, as programs run in order, and returns its result when it is collected.

    With `overlap`, a request may have two steps in flight.
    """

    def __init__(self, capacity: Capacity, *, overlap: bool = True) -> None:
        self.capacity = capacity
        self._most_in_flight = 2 if overlap else 1
        self._num_dispatched = self._num_collected = 0
        self.compiles_after_ready = 0
        self.plans: list[StepPlan] = []
        self.loads: list[PageCopy] = []
        self._random = random.Random(0)
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._pools = [
            [[[-1] * capacity.page_size for _ in range(num_pages)] for num_pages in capacity.pages_by_group]
            for _ in range(capacity.num_ranks)
        ]
        self._states: list[list[list[int]]] = [
            [[-1] for _ in range(capacity.num_states)] for _ in range(capacity.num_ranks)
        ]
        self._host: dict[tuple[int, int, int], list[int]] = {}

    @property
    def num_in_flight(self) -> int:
        """The number of steps that were dispatched and not collected."""
        return self._num_dispatched - self._num_collected

    def stage_times(self) -> tuple[StageTimes, ...]:
        return ()

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        return ()

    def dispatch(self, plan: StepPlan) -> object:
        self._check_sizes(plan)
        self.plans.append(plan)
        self._num_dispatched += 1
        for group, rank, page, host_slot in plan.saves:
            self._host[group, rank, host_slot] = list(self._rows(rank, group)[page])
        self.loads += plan.loads
        for group, rank, host_slot, page in plan.loads:
            self._rows(rank, group)[page] = list(self._host[group, rank, host_slot])
        for opened in plan.opens:
            columns = len(opened.cached_pages[0])
            if self.capacity.num_states:
                assert opened.num_cached_tokens <= columns * self.capacity.page_size
                assert (opened.state is None) == (opened.num_cached_tokens == 0)
                assert opened.num_cached_tokens % self.capacity.state_unit == 0
            else:
                assert opened.num_cached_tokens == columns * self.capacity.page_size
                assert opened.state is None
            assert len(opened.cached_pages) == len(self.capacity.pages_by_group)
            tables = [[-1] * (columns - len(pages)) + list(pages) for pages in opened.cached_pages]
            length = self.capacity.rotation_length
            is_long = length is not None and len(opened.prompt_ids) + len(opened.output_ids) > length
            self._slots[opened.rank, opened.slot] = _Slot(
                opened,
                tables,
                opened.num_cached_tokens,
                len(opened.output_ids),
                rotation=VOCAB if is_long else 0,
                row=opened.state,
                folded=opened.num_cached_tokens,
            )
        for chunk in plan.chunks:
            assert len({len(pages) for pages in chunk.new_pages}) == 1, "groups get pages for different tokens"
            end = -(-(chunk.start + chunk.length) // self.capacity.page_size)
            for table, pages in zip(self._slots[chunk.rank, chunk.slot].tables, chunk.new_pages, strict=True):
                if pages:
                    first = end - len(pages)
                    assert len(table) >= first
                    table[first:] = pages
        loaded = {(group, rank, page) for group, rank, _, page in plan.loads}
        assert len(loaded) == len(plan.loads), "a page is loaded twice"
        readers = Counter(page for chunk in plan.chunks for page in self._read(chunk))
        written = [page for chunk in plan.chunks for page in self._written(chunk)]
        assert all(readers[page] == 1 for page in written), "a page is written that another sequence of the step reads"
        assert loaded.isdisjoint(written), "a page is loaded and computed"
        self._check_states(plan)
        self._check_stages(plan)
        result = StepResult(tokens=[], logprobs={}, prompt_logprobs={}, drafts=[])
        drawn = DrawResult([], {})
        for draw in plan.draws:
            self._draw(draw, drawn)
        for index in range(len(plan.chunks)):
            self._run(plan, index, result)
        return _Handle(result, drawn)

    def collect_draws(self, handle: object) -> DrawResult:
        assert isinstance(handle, _Handle)
        assert handle.drawn.tokens
        return handle.drawn

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, _Handle)
        self._num_collected += 1
        return handle.result

    def _check_stages(self, plan: StepPlan) -> None:
        """Check that few steps of a request are in flight, and that prompts wait for no tokens.

        The first stage waits until the last one has drawn the tokens that a step needs; those of the step as many steps
        before as there are stages are there.
        """
        number = self._num_dispatched - 1
        decodes = [*plan.chunks[: plan.num_decodes], *plan.draws]
        awaited = [self._slots[decode.rank, decode.slot].steps[-1] for decode in decodes]
        prompts = plan.chunks[plan.num_decodes + plan.num_forced :]
        drawn = number - self.capacity.num_stages
        assert not prompts or all(step <= drawn for step in awaited), "a prompt waits for tokens of decodes"
        for chunk in prompts:
            self._slots[chunk.rank, chunk.slot].steps = [number]
        forced = plan.chunks[plan.num_decodes : plan.num_decodes + plan.num_forced]
        for rank, index in {(step.rank, step.slot) for step in [*decodes, *forced]}:
            slot = self._slots[rank, index]
            slot.steps = [step for step in slot.steps if step >= self._num_collected] + [number]
            assert len(slot.steps) <= self._most_in_flight, "too many steps of a request are in flight"

    def _draw(self, draw: Draw, drawn: DrawResult) -> None:
        slot = self._slots[draw.rank, draw.slot]
        sampling, seen, slot.hidden = slot.opened.sampling, slot.hidden, None
        assert slot.opened.constrained
        assert seen is not None, "a draw without a step before"
        num_outputs = slot.length - len(slot.opened.prompt_ids)
        token = draw.token
        if token is None:
            token = next_token(seen, num_outputs, sampling, slot.opened.stop_ids)
            token = first_allowed(token, draw.allowed, VOCAB)
            if sampling.logprobs is not None:
                drawn.logprobs[len(drawn.tokens)] = [logprobs_of(seen, token)]
        assert num_outputs < sampling.max_tokens, "a draw beyond max_tokens"
        slot.last_token = token
        drawn.tokens.append(token)

    def _first_seen(self, group: int, position: int) -> int:
        """Return the first position that a query at `position` sees."""
        return 0 if group == 0 else max(0, position - self.capacity.window_groups[group - 1].window + 1)

    def _rows(self, rank: int, group: int) -> list[list[int]]:
        """Return the pages of a group, or after the last group the states."""
        pools = self._pools[rank]
        return pools[group] if group < len(pools) else self._states[rank]

    def _check_states(self, plan: StepPlan) -> None:
        """Check that no row is written that another chunk of the step reads or writes, or that a load fills for it."""
        if not self.capacity.num_states:
            assert all(chunk.state is None for chunk in plan.chunks)
            return
        written: dict[tuple[int, int], Chunk] = {}
        for chunk in plan.chunks:
            slot = self._slots[chunk.rank, chunk.slot]
            assert slot.owns_row or chunk.state is not None, "a sequence would write the row of a snapshot"
            rows = [slot.row] if chunk.state is None else [chunk.state.target, chunk.state.snapshot]
            for row in rows:
                if row is not None:
                    assert (chunk.rank, row) not in written, "a state is written twice"
                    written[chunk.rank, row] = chunk
        for chunk in plan.chunks:
            slot = self._slots[chunk.rank, chunk.slot]
            if slot.row is not None:
                assert written.get((chunk.rank, slot.row), chunk) is chunk, "a state is written that another slot reads"
        for group, rank, _, row in plan.loads:
            if group == len(self.capacity.pages_by_group) and (chunk := written.get((rank, row))) is not None:
                assert self._slots[rank, chunk.slot].row == row, "a state is loaded and overwritten"

    def _fold(self, chunk: Chunk, seen: list[int], start: int) -> None:
        """Write the rows of a chunk that begins at `start`, with the tokens `seen` so far, which all stay."""
        capacity = self.capacity
        slot, rows = self._slots[chunk.rank, chunk.slot], self._states[chunk.rank]
        tokens = [token + slot.rotation for token in seen]
        if slot.folded:
            assert slot.row is not None
            assert rows[slot.row] == tokens[: slot.folded], "the row has the state of another sequence"
        write, certain = chunk.state, len(seen)
        if write is not None:
            slot.row, slot.owns_row = write.target, True
            if write.snapshot is not None:
                assert slot.folded < write.snapshot_tokens <= certain
                assert start < write.snapshot_tokens
                assert write.snapshot_tokens % capacity.state_unit == 0
                rows[write.snapshot] = tokens[: write.snapshot_tokens]
        slot.folded = max(slot.folded, capacity.folded_tokens(certain))
        if slot.folded:
            assert slot.row is not None
            rows[slot.row] = tokens[: slot.folded]

    def _read(self, chunk: Chunk) -> list[tuple[int, int, int]]:
        slot, size = self._slots[chunk.rank, chunk.slot], self.capacity.page_size
        end = -(-(slot.length + chunk.length) // size)
        return [
            (group, chunk.rank, page)
            for group, table in enumerate(slot.tables)
            for page in table[self._first_seen(group, slot.length) // size : end]
        ]

    def _written(self, chunk: Chunk) -> list[tuple[int, int, int]]:
        """Return the pages that a chunk writes, without those of cached tokens that it computes again."""
        slot, size = self._slots[chunk.rank, chunk.slot], self.capacity.page_size
        first = max(slot.length // size, len(slot.opened.cached_pages[0]))
        part = slice(first, -(-(slot.length + chunk.length) // size))
        return [(group, chunk.rank, page) for group, table in enumerate(slot.tables) for page in table[part]]

    def _run(self, plan: StepPlan, index: int, result: StepResult) -> None:
        chunk = plan.chunks[index]
        slot, pools = self._slots[chunk.rank, chunk.slot], self._pools[chunk.rank]
        size = self.capacity.page_size
        sampling = slot.opened.sampling
        assert sampling.seed is not None
        start = slot.length
        if chunk.tokens is None:
            assert start <= chunk.start <= start + 2 * self.capacity.max_drafts
            assert slot.last_token is not None, "a decode before any token was sampled"
            tokens = [slot.last_token]
        else:
            assert chunk.start == start
            tokens = chunk.tokens
            assert len(tokens) == chunk.length
        assert start + chunk.length < self.capacity.max_model_len + chunk.pooled
        pages = -(-(start + chunk.length) // size)
        assert all(len(table) >= pages for table in slot.tables), "pages don't fit the tokens"
        if not self.capacity.max_drafts:
            assert {len(table) for table in slot.tables} == {max(pages, len(slot.opened.cached_pages[0]))}
        for token in tokens:
            self._write(chunk, slot.length, token)
            slot.length += 1
        result.tokens.append([])
        accepted, rejected = 0, False
        while True:
            seen, *windows = (
                [
                    kv[table[i // size]][i % size] - slot.rotation
                    for i in range(self._first_seen(group, start), slot.length)
                ]
                for group, (kv, table) in enumerate(zip(pools, slot.tables))
            )
            for window in windows:
                seen += [] if window == seen[len(seen) - len(window) :] else window
            if self.capacity.num_states and not accepted:
                self._fold(chunk, seen, start)
            if not chunk.sample:
                slot.hidden = seen if slot.opened.constrained else None
                break
            assert not slot.opened.constrained
            assert not plan.greedy or sampling.greedy
            token = next_token(seen, slot.num_outputs, sampling, slot.opened.stop_ids)
            slot.last_token = token
            slot.num_outputs += 1
            assert slot.num_outputs <= sampling.max_tokens, "a step beyond max_tokens"
            result.tokens[index].append(token)
            if sampling.logprobs is not None:
                result.logprobs.setdefault(index, []).append(logprobs_of(seen, token))
            if chunk.tokens is not None or accepted == chunk.length - 1:
                break
            rejected = self._random.random() < 0.3
            draft = VOCAB - 1 - token if rejected else token
            if rejected:
                for position in range(slot.length, start + chunk.length):  # the program computes those after it, too
                    self._write(chunk, position, draft)
                break
            self._write(chunk, slot.length, draft)
            accepted += 1
            slot.length += 1
        if chunk.pooled:
            assert self.capacity.pooled_size
            assert not chunk.sample
            assert slot.opened.num_cached_tokens == 0 or not self.capacity.pools_all_tokens, "tokens without a state"
            assert slot.length == len(slot.opened.prompt_ids), "a vector before the end"
            result.pooled[index] = vector_of(seen)
        if self.capacity.max_drafts:
            result.drafts.append((accepted + rejected, accepted))
        if sampling.prompt_logprobs is not None and chunk.logits == chunk.length and chunk.tokens is not None:
            following = [*tokens[1:], *([] if chunk.target is None else [chunk.target])]
            result.prompt_logprobs[index] = [
                logprobs_of(seen[: chunk.start + i + 1], token) for i, token in enumerate(following)
            ]

    def _write(self, chunk: Chunk, position: int, token: int) -> None:
        slot, size = self._slots[chunk.rank, chunk.slot], self.capacity.page_size
        length = self.capacity.rotation_length
        assert length is None or slot.rotation or position < length, "a sequence grows past the length of its rotation"
        for kv, table in zip(self._pools[chunk.rank], slot.tables):
            page, value = kv[table[position // size]], token + slot.rotation
            if position < len(slot.opened.cached_pages[0]) * size:
                assert page[position % size] == value, "a token that others read is computed again, but differs"
            page[position % size] = value

    def _check_drafts_beside_prompts(self, plan: StepPlan, total: int) -> None:
        """Check that they need no larger program, and that it draws enough tokens."""
        capacity = self.capacity
        assert capacity.verifies_beside_prompts
        without, drawn = [0] * capacity.num_ranks, [0] * capacity.num_ranks
        for chunk in plan.chunks:
            decodes = chunk.tokens is None
            without[chunk.rank] += 1 if decodes else chunk.length
            drawn[chunk.rank] += chunk.length if decodes else 1
        size, of_prompts = (next(b for b in capacity.token_buckets if b >= n) for n in (total, max(without)))
        assert size == of_prompts
        assert max(drawn) <= capacity.max_drawn(size)

    def _check_sizes(self, plan: StepPlan) -> None:
        capacity = self.capacity
        total = plan.max_rank_tokens(capacity.num_ranks)
        slots = [(chunk.rank, chunk.slot) for chunk in plan.chunks]
        assert len(slots) == len(set(slots))
        assert all(0 <= rank < capacity.num_ranks and 0 <= slot < capacity.num_slots for rank, slot in slots)
        decodes = plan.chunks[: plan.num_decodes]
        assert all(chunk.tokens is None and chunk.length == chunk.logits for chunk in decodes)
        assert sum(chunk.length - 1 for chunk in decodes) == plan.num_drafts
        assert all(chunk.tokens is not None and chunk.length >= 1 for chunk in plan.chunks[plan.num_decodes :])
        assert plan.chunks or plan.draws
        lengths = [(chunk.rank, chunk.length) for chunk in sorted(decodes, key=lambda chunk: chunk.rank)]
        assert lengths == sorted(lengths)
        if plan.num_decodes < len(plan.chunks):
            assert total <= capacity.token_buckets[-1]
            if plan.num_drafts:
                self._check_drafts_beside_prompts(plan, total)
        elif plan.num_drafts:
            assert total <= capacity.verify_buckets[-1]
        else:
            assert total <= capacity.decode_buckets[-1]
        if any(chunk.logits > 1 for chunk in plan.chunks[plan.num_decodes :]):
            assert total <= capacity.prompt_logprob_tokens
