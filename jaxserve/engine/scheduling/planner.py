"""Plans one step: all decodes first, then prompt chunks in the rest of the token budget.

It turns the running requests of the table into a `StepPlan` and allocates the pages that each chunk writes; `prefill`
chooses the prompt chunks and starts waiting requests. A plan covers all data-parallel ranks, which step together; each
rank has its own token budget and pages. The scheduler retracts requests beforehand and processes the results.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from jaxserve.engine.scheduling.admission import NewTokenRatio
from jaxserve.engine.scheduling.drawing import Drawing, plan_run
from jaxserve.engine.scheduling.forced_runs import ForcedRuns
from jaxserve.engine.scheduling.micro_batches import MicroBatches
from jaxserve.engine.scheduling.pooled_share import PooledShare
from jaxserve.engine.scheduling.prefill import PrefillChooser
from jaxserve.engine.scheduling.rank import Rank
from jaxserve.engine.scheduling.request import Request
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.engine.scheduling.step_times import StepTimes
from jaxserve.engine.speculation.speculation import Speculation
from jaxserve.errors import ConfigError
from jaxserve.step_plan import Capacity, Chunk, DraftRead, PageCopy, SlotOpen, StateWrite, StepPlan


@dataclasses.dataclass
class _Decodes:
    """The decodes of a step while it is planned: their requests, and the pages that each adds.

    `tokens` counts the tokens of each rank so far, forced ones included. `greedy` tells whether all decodes are greedy.
    `states` says where the state of a request is written, if elsewhere than before.
    """

    tokens: list[int]
    requests: list[Request] = dataclasses.field(default_factory=list)
    pages: list[tuple[tuple[int, ...], ...]] = dataclasses.field(default_factory=list)
    greedy: bool = True
    states: dict[str, StateWrite] = dataclasses.field(default_factory=dict)

    def chunks(self, lengths: Iterable[int]) -> list[Chunk]:
        """Return the chunk of each decode: one token, and the draft tokens that it verifies."""
        chunks = [
            Chunk(  # by position, in the order of its fields: names would take a third longer
                request.request_id,
                request.slot,  # type: ignore[arg-type] # it runs, so it has one
                request.rank,
                request.num_planned_tokens - length,
                length,
                None,
                pages,
                length,
                request.grammar is None,
            )
            for request, pages, length in zip(self.requests, self.pages, lengths)
        ]
        if not self.states:
            return chunks
        return [msgspec.structs.replace(chunk, state=self.states.get(chunk.request_id)) for chunk in chunks]


@dataclasses.dataclass
class _ChosenDrafts:
    """The length of each decode with its draft; with a draft model, its reads and the number of steps it drafts."""

    lengths: list[int]
    reads: list[DraftRead] = dataclasses.field(default_factory=list)
    steps: int = 0


class Planner:
    """Plans within `capacity` and the limits of `Scheduler`. Raises `ConfigError` for limits below 1.

    `prefills` chooses the prompt chunks, and which waiting requests start; `runs` how forced tokens are computed. With
    several pipeline stages, `micro_batches` divides the decodes; the last step planned had the `share` of one of them.
    """

    def __init__(
        self,
        table: RequestTable,
        capacity: Capacity,
        *,
        chunked_prefill_size: int,
        max_prefill_tokens: int,
        max_num_batched_tokens: int,
        prefill_max_requests: int | None = None,
        ratio: NewTokenRatio,
        shares_prefixes: bool,
        long_prefill_token_threshold: int = 0,
        mixed_step_seconds: float = 0.0,
        pooled_time_share: float = 1.0,
        speculation: Speculation | None = None,
        overlap: bool = True,
    ) -> None:
        for name, value in (
            ("chunked_prefill_size", chunked_prefill_size),
            ("max_prefill_tokens", max_prefill_tokens),
            ("max_num_batched_tokens", max_num_batched_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        assert capacity.decode_buckets[-1] >= capacity.num_slots, capacity
        assert capacity.prompt_logprob_tokens > capacity.num_slots, capacity
        self._speculation = speculation
        self._table = table
        self._capacity = capacity
        self._page_size = capacity.page_size
        self._most_read = max(capacity.draft_read_buckets, default=0)
        self._max_unread = capacity.max_unread
        self._rotation_length = capacity.rotation_length
        self._no_pages: tuple[tuple[int, ...], ...] = ((),) * len(capacity.pages_by_group)
        self._step_tokens = min(max_num_batched_tokens, capacity.token_buckets[-1])
        stages, ranks = capacity.num_stages, table.ranks
        self.micro_batches = MicroBatches(ranks, stages, 2 if overlap else 1) if stages > 1 else None
        self.share = 1.0
        self._micro_batch = 0  # the one that the current step decodes
        self._num_others = [0] * len(ranks)  # by rank, the requests of the others
        self.times = StepTimes(capacity)
        self.runs = ForcedRuns(self.times)
        prefill_tokens = min(chunked_prefill_size, max_prefill_tokens)
        self.prefills = PrefillChooser(
            table,
            capacity,
            prefill_tokens=prefill_tokens,
            step_tokens=self._step_tokens,
            max_requests=prefill_max_requests,
            ratio=ratio,
            long_prompt_tokens=long_prefill_token_threshold,
            shares_prefixes=shares_prefixes,
            times=self.times,
            mixed_step_seconds=mixed_step_seconds / stages,  # as long as a stage may take of it
            pooled_share=PooledShare(self.times, pooled_time_share, prefill_tokens),
        )

    def next_step(self, *, admit: bool) -> tuple[StepPlan, list[Request], list[Request]] | None:
        """Return the next step and the requests of its chunks and of its draws, or None if there is nothing to compute.

        With `admit`, waiting requests may start. There must be pages for all decodes: see `is_short_of_pages`.
        """
        table = self._table
        decodes = _Decodes([0] * len(table.ranks))
        chunks: list[Chunk] = []
        requests: list[Request] = []
        opens: list[SlotOpen] = []
        drawing = Drawing([[] for _ in table.ranks])
        chosen: list[tuple[Request, int]] | None = None
        for rank in table.ranks:
            rank.cache.tier.save_added()
        if self.micro_batches is not None:
            chosen = self._plan_micro_batch(self.micro_batches, decodes, drawing, opens, admit=admit)
        else:
            for rank in table.ranks:
                self._plan_decodes(rank, rank.decoding.values(), decodes, drawing)
        if any(drawing.forced):
            self._plan_forced(decodes, chunks, requests, drawing)
        num_forced, greedy = len(chunks), decodes.greedy
        if chosen is None:
            chosen = self.prefills.choose(decodes.tokens, opens, admit=admit)
        for request, length in sorted(chosen, key=lambda pair: pair[0].num_planned_tokens == 0):
            chunk = self._prefill_chunk(request, length)
            chunks.append(chunk)
            requests.append(request)
            greedy = greedy and (request.greedy or not chunk.sample)
        if not decodes.requests and not chunks and not drawing.draws:
            return None
        if self.micro_batches is not None:
            self.micro_batches.add_step(self._micro_batch)
        drafts = _ChosenDrafts([1] * len(decodes.requests))
        if self._speculation is not None and decodes.requests:
            self._plan_drafts(self._speculation, decodes, chunks, drafts)
        saves, loads = self._take_copies()
        plan = StepPlan(
            saves=saves,
            loads=loads,
            opens=opens,
            chunks=decodes.chunks(drafts.lengths) + chunks,
            num_decodes=len(decodes.requests),
            greedy=greedy,
            num_drafts=sum(drafts.lengths) - len(drafts.lengths),
            draft_reads=drafts.reads,
            draft_steps=drafts.steps,
            draws=drawing.draws,
            num_forced=num_forced,
        )
        return plan, decodes.requests + requests, drawing.requests

    def is_short_of_pages(self, rank: Rank) -> bool:
        """Return whether the rank lacks pages for its decodes, or if there are none, for its oldest prefill."""
        page_size = self._page_size
        if rank.decoding:
            # Usually there is a page for each request, so the exact count is not needed.
            if len(rank.decoding) <= rank.num_available_pages:
                return False
            waiting = [request for request in rank.decoding.values() if request.num_planned_tokens % page_size == 0]
        else:
            oldest = next(iter(rank.prefilling.values()), None)
            waiting = [oldest] if oldest is not None and oldest.num_planned_tokens % page_size == 0 else []
        if len(waiting) <= rank.num_available_pages:
            return False
        for request in waiting:
            rank.give_up_passed(request)
        return len(waiting) > rank.num_available_pages

    def _take_copies(self) -> tuple[list[PageCopy], list[PageCopy]]:
        """Return the saves and loads of all ranks."""
        saves: list[PageCopy] = []
        loads: list[PageCopy] = []
        for rank in self._table.ranks:
            saved, loaded = rank.cache.tier.take_copies()
            if saved or loaded:
                saves += [(group, rank.index, page, slot) for group, page, slot in saved]
                loads += [(group, rank.index, slot, page) for group, slot, page in loaded]
        return saves, loads

    def _plan_decodes(self, rank: Rank, decoding: Iterable[Request], decodes: _Decodes, drawing: Drawing) -> None:
        """Add the decoding requests of a rank. A request with a grammar is added if its next token is known or can be
        drawn."""
        page_size, no_pages, states = self._page_size, self._no_pages, rank.states
        requests, pages, before = decodes.requests, decodes.pages, len(decodes.requests)
        ending = []
        for request in decoding:
            outputs, most = request.num_planned_outputs + 1, request.max_new_tokens
            position = request.num_planned_tokens
            constrained = request.grammar is not None
            if constrained:
                if not drawing.plan(request):
                    continue
                outputs = request.num_planned_outputs
                if position == request.num_known_tokens:  # its next token is drawn by this step
                    if outputs == most:
                        ending.append(request)
                        continue
                    if position == self._rotation_length and not request.is_long:
                        continue  # with that token, it starts again
            elif outputs > request.pause_at:  # drafts in flight may end it, or tokens in flight its reasoning
                continue
            requests.append(request)
            pages.append(no_pages if position % page_size else rank.extend(request, position + 1))
            request.num_planned_tokens = position + 1
            request.num_planned_outputs = outputs
            if states is not None and (write := states.write_output(request, position + 1)) is not None:
                decodes.states[request.request_id] = write
            if constrained:
                continue
            if outputs == most and not request.num_unverified_tokens:
                ending.append(request)
            if not request.greedy:
                decodes.greedy = False
        decodes.tokens[rank.index] += len(requests) - before
        for request in ending:
            rank.advance(request, last=True)

    def _plan_micro_batch(
        self, micro_batches: MicroBatches, decodes: _Decodes, drawing: Drawing, opens: list[SlotOpen], *, admit: bool
    ) -> list[tuple[Request, int]] | None:
        """Plan the decodes of the first micro-batch in turn that has any.

        Prompts don't wait for tokens that the last stage has yet to draw, but are computed alone until then: these are
        returned, or [] if there are none; else None. A step without decodes is that of an empty micro-batch.
        """
        parts, turns, chosen = micro_batches.divide(), micro_batches.turns, None
        self._micro_batch = next((number for number in turns if not any(parts[number])), turns[0])
        for number in turns:
            if not any(parts[number]):
                continue
            if chosen is None and not micro_batches.is_drawn(number):
                chosen = self.prefills.choose(decodes.tokens, opens, admit=admit)
                if chosen:
                    break
            if not micro_batches.may_step(number):
                break
            micro_batches.even_out(number, parts)
            for rank, requests in zip(self._table.ranks, parts[number]):
                self._plan_decodes(rank, requests, decodes, drawing)
            if decodes.requests or drawing.draws or any(drawing.forced):
                self._micro_batch = number
                break
        own = parts[self._micro_batch]
        self._num_others = [sum(len(part[i]) for part in parts if part is not own) for i in range(len(own))]
        num_own = sum(map(len, own))
        self.share = num_own / max(num_own + sum(self._num_others), 1)
        return chosen

    def _plan_forced(self, decodes: _Decodes, chunks: list[Chunk], requests: list[Request], drawing: Drawing) -> None:
        """Plan the runs of forced tokens that wait: a run makes a chunk of its own, or its next token a decode."""
        ranks = list(zip(self._table.ranks, drawing.forced))
        runs = drawing.run_lengths()
        fits = max(own + sum(run) for own, run in zip(decodes.tokens, runs)) <= self._step_tokens
        if not fits or not self.runs.together(decodes.tokens, runs):
            drawing.one_by_one = True
            for rank, forced in ranks:
                self._plan_decodes(rank, forced, decodes, drawing)
            return
        for rank, forced in ranks:
            for request, run in zip(forced, runs[rank.index]):
                chunk = plan_run(rank, request, run, len(forced), self._page_size)
                decodes.tokens[rank.index] += chunk.length
                chunks.append(chunk)
                requests.append(request)

    def _choose_drafts(self, speculation: Speculation, decodes: _Decodes, chunks: Sequence[Chunk]) -> list[int] | None:
        """Return the lengths of drafts by level of acceptance, or None. Beside prompts, drafts fill the program."""
        ranks: list[list[Request]] = [[] for _ in self._table.ranks]
        for request in decodes.requests:
            ranks[request.rank].append(request)
        if not chunks:
            return speculation.choose(ranks)
        capacity = self._capacity
        if not capacity.verifies_beside_prompts or any(chunk.wants_prompt_logprobs for chunk in chunks):
            return None
        rows = list(map(len, ranks))
        tokens = rows.copy()
        for chunk in chunks:
            rows[chunk.rank] += 1
            tokens[chunk.rank] += chunk.length
        size = capacity.bucket("mixed", max(tokens))
        drawn = capacity.max_drawn(size)
        return speculation.fill(ranks, [min(size - own, drawn - count) for own, count in zip(tokens, rows)])

    def _plan_drafts(
        self, speculation: Speculation, decodes: _Decodes, chunks: Sequence[Chunk], drafts: _ChosenDrafts
    ) -> None:
        """Choose the drafts of the decodes, and sort these by rank and length.

        Drafts never take pages that others need, nor do they pass a limit of the sequence.
        """
        lengths = self._choose_drafts(speculation, decodes, chunks)
        if lengths is None:
            return
        rows = Counter(request.rank for request in decodes.requests)
        rows.update(chunk.rank for chunk in chunks)
        rows.update(dict(enumerate(self._num_others)))
        page_size, rotation_length = self._page_size, self._rotation_length
        for index, request in enumerate(decodes.requests):
            planned = request.num_planned_tokens
            count = min(lengths[speculation.level(request)], request.pause_at - request.num_planned_outputs)
            if rotation_length is not None and not request.is_long:
                count = min(count, rotation_length - planned)
            rank = self._table.ranks[request.rank]
            if count > (room := -planned % page_size):
                # Each other request may need a page for its next step
                count = min(count, room + max(0, rank.num_available_pages - rows[request.rank]) * page_size)
            if (
                count <= 0
                or request.grammar is not None
                or (self._most_read and not self._read_for_drafts(rank, request, drafts.reads))
            ):
                continue
            drafts.lengths[index] += count
            request.plan_drafts(count)
            request.num_read_tokens = max(0, request.num_planned_tokens + 1 - self._max_unread)
            added = rank.extend(request, planned + count, drafts=True)
            decodes.pages[index] = tuple(before + more for before, more in zip(decodes.pages[index], added))
        if self._most_read and (longest := max(drafts.lengths) - 1):
            drafts.steps = speculation.draft_steps(longest)
        in_order = sorted(
            zip(decodes.requests, decodes.pages, drafts.lengths), key=lambda decode: (decode[0].rank, decode[2])
        )
        decodes.requests, decodes.pages, drafts.lengths = map(list, zip(*in_order))

    def _read_for_drafts(self, rank: Rank, request: Request, reads: list[DraftRead]) -> bool:
        """Let a draft model read the unread tokens of a sequence, as far as the step has room; return whether few
        enough are left for it to draft."""
        unread = request.num_planned_tokens - request.num_read_tokens  # before this step
        room = self._most_read - sum(read.length for read in reads if read.rank == rank.index)
        length = min(unread - self._max_unread, room)
        if length > 0:
            assert request.slot is not None
            reads.append(DraftRead(rank=rank.index, slot=request.slot, back=unread - 1, length=length))
            request.num_read_tokens += length
            rank.mark_read_by_draft(request)
        return unread - max(length, 0) <= self._max_unread

    def _prefill_chunk(self, request: Request, length: int) -> Chunk:
        """Plan the next `length` fill tokens of a request; the last one also samples its first new token."""
        rank = self._table.ranks[request.rank]
        start = request.num_planned_tokens
        end = start + length
        is_last = end == request.num_fill_tokens
        needs_logits = is_last and request.max_new_tokens > 0
        samples = needs_logits and request.grammar is None
        wants = request.needs_prompt_logprobs
        slot = request.slot
        assert slot is not None
        new_pages = rank.extend(request, end)
        request.num_planned_tokens = end
        request.num_planned_outputs += samples
        rank.cache_prompt(request)
        chunk = Chunk(
            request_id=request.request_id,
            slot=slot,
            rank=rank.index,
            start=start,
            length=length,
            tokens=request.tokens(start, end),
            new_pages=new_pages,
            logits=length if wants else int(needs_logits),
            sample=samples,
            target=request.prompt_ids[end] if wants and end < request.num_prompt_tokens else None,
            state=None if rank.states is None else rank.states.write_prompt(request, start),
            pooled=is_last and request.pooled,
        )
        if is_last:
            request.micro_batch = self._micro_batch
            rank.advance(request, last=request.num_planned_outputs >= request.max_new_tokens)
        return chunk
