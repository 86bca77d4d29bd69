"""Runs step plans on the devices: one packed transfer and one program per step; results are fetched asynchronously."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxserve.api_types import SamplingParams, StageTimes, TokenLogprobs
from jaxserve.observability.timeline import Timeline
from jaxserve.runtime.execution.device_commands import DeviceCommands, Pages
from jaxserve.runtime.execution.expert_tokens import ExpertTokens
from jaxserve.runtime.execution.step_order import StepOrder
from jaxserve.runtime.programs.compile_counter import CompileCounter
from jaxserve.runtime.programs.table import KINDS
from jaxserve.runtime.step import batch as batches
from jaxserve.runtime.step import kv_scales
from jaxserve.runtime.step.draft import pack_drafts, pack_reads
from jaxserve.runtime.step.draw import DrawOutput, pack_draws
from jaxserve.runtime.step.kv_scales import KV_SCALES_KEY
from jaxserve.runtime.step.page_copies import num_groups, pages_per_copy
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.runtime.step.sampling import Logprobs
from jaxserve.runtime.step.slot_update import (
    ADJUST_KEY,
    READ_PROMPTS_KEY,
    UPDATE_KEY,
    pack_adjustments,
    pack_prompts,
    pack_updates,
)
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity, Chunk, Draw, DrawResult, PageCopy, SlotOpen, StepPlan, StepResult

logger = logging.getLogger("jaxserve.runtime")

_NO_REQUESTS = StepPlan(opens=[], chunks=[], num_decodes=0, greedy=True)


@dataclasses.dataclass(frozen=True)
class _DrawsInFlight:
    """The draws before a step: the row of each in its rank, and its parameters."""

    rows: list[int]
    sampling: list[SamplingParams]
    output: DrawOutput


@dataclasses.dataclass
class _InFlight:
    """A dispatched step, with its `number` if it has chunks. It gets an `output` when all its programs have started.

    If that has log probabilities, `sampling[i]` is kept for chunk i, as another request may have its slot by `collect`.
    """

    plan: StepPlan
    sampling: list[SamplingParams]
    drawn: _DrawsInFlight | None
    number: int | None = None
    output: StepOutput | None = None

    def receive(self, output: StepOutput) -> None:
        """Take the output, and start to copy to the host what is wanted of it."""
        if output.logprobs is not None or output.prompt_logprobs is not None:
            output = _without_unwanted(output, self.sampling)
        if output.pooled is not None and not any(chunk.pooled for chunk in self.plan.chunks):
            output = dataclasses.replace(output, pooled=None)
        for array in jax.tree.leaves((output.tokens, output.logprobs, output.prompt_logprobs, output.pooled)):
            array.copy_to_host_async()
        self.output = output


class DeviceExecutor:
    """Turns plans into commands, in the order of `dispatch`. If a program raises, the state is lost.

    `timeline` records the phases of a step. `substitute` returns the program to run instead of one that could not be
    loaded. `remote_compiles` returns how many programs the other processes of the mesh have compiled, and
    `remote_stage_times` the times of the pipeline stages that they have. With
    `calculates_kv_scales`, the first prompts decide the scales of the KV cache, before the first page is written.
    `expert_tokens` counts the tokens of a mixture's experts.
    """

    def __init__(
        self,
        commands: DeviceCommands,
        capacity: Capacity,
        timeline: Timeline | None = None,
        substitute: Callable[[ProgramKey], ProgramKey] = lambda key: key,
        remote_compiles: Callable[[], int] = int,
        remote_stage_times: Callable[[], Mapping[int, StageTimes]] = dict,
        *,
        calculates_kv_scales: bool = False,
        expert_tokens: ExpertTokens | None = None,
    ) -> None:
        self._commands = commands
        self._capacity = capacity
        self._timeline = timeline or Timeline()
        self._substitute = substitute
        self._sampling: dict[tuple[int, int], SamplingParams] = {}
        self._compiles = CompileCounter()
        self._remote_compiles = remote_compiles
        self._remote_stage_times = remote_stage_times
        self._lacks_kv_scales = calculates_kv_scales
        self._expert_tokens = expert_tokens or ExpertTokens()
        self._order = StepOrder() if capacity.num_stages > 1 else None

    @property
    def capacity(self) -> Capacity:
        """The sizes that the programs can hold."""
        return self._capacity

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled since this executor was made, in all processes of its mesh; anything but zero is a bug."""
        return self._compiles.count + self._remote_compiles()

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Return how many tokens each expert of each layer has computed, as of the last step collected."""
        return self._expert_tokens.read()

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Return the times of the pipeline stages so far, () if there is only one."""
        if self._order is None:
            return ()
        found = {**self._remote_stage_times(), **self._commands.stage_times()}
        return tuple(found.get(stage, StageTimes()) for stage in range(self._capacity.num_stages))

    def connect(self) -> None:
        """Run a step without requests: processes connect to each other before a request has to wait for it."""
        self.collect(self.dispatch(_NO_REQUESTS))

    def warm_up(self, keys: Sequence[ProgramKey]) -> None:
        """Run programs without requests, which changes nothing, so that no request waits for the work of a first run.

        On an NVIDIA GPU, a first run builds the program's CUDA graph; a program with collectives builds it in its
        second run. XLA drops all graphs when it loads another program, so call this once all programs are loaded.
        """
        none: list[list[int]] = [[]] * self._capacity.num_ranks
        for key in (*keys, *keys):
            match key:
                case ("read_pages", int(group), _):
                    self._commands.save(group, none, none)
                case ("write_pages", int(group), _):
                    self._commands.load(group, none, none)
                case _:
                    jax.block_until_ready(self._run_empty(key))
        self._commands.store_arrived()

    def _run_empty(self, key: ProgramKey) -> object:
        """Run a program without requests, and return its output."""
        packed = KINDS[key.kind].empty_input(self._capacity, key)
        if not KINDS[key.kind].is_step:
            return self._commands.run(key, packed)
        received: list[object] = []
        self._commands.finish(self._commands.start(key, packed, -1, received.append))
        return received

    def dispatch(self, plan: StepPlan) -> _InFlight:
        """Copy pages, open slots, then start the step.

        Waits for nothing, except if it loads pages whose copies to the host are not complete.
        """
        if self._lacks_kv_scales and (tokens := [token for chunk in plan.chunks for token in chunk.tokens or ()]):
            self._lacks_kv_scales = False
            with self._timeline.span("dispatch"):
                self._commands.run(KV_SCALES_KEY, kv_scales.pack_prompts(tokens, self._capacity))
            count = min(len(tokens), kv_scales.num_tokens(self._capacity))
            logger.info("KV cache: scales calculated from the first %d tokens of prompts", count)
        if plan.opens or plan.saves or plan.loads:
            with self._timeline.span("dispatch"):
                self._prepare(plan)
        if plan.draft_reads or plan.draft_steps:
            with self._timeline.span("dispatch"):
                self._draft(plan)
        drawn = None
        if plan.draws:
            with self._timeline.span("dispatch"):
                drawn = self._draw(plan.draws)
            if not plan.chunks:
                return _InFlight(plan, [], drawn)
        with self._timeline.span("build"):
            key = self._substitute(batches.choose_program(plan, self._capacity))
            pack = KINDS[key.kind].pack
            assert pack is not None
            packed = pack(plan, self._capacity, key)
        with self._timeline.span("dispatch"):
            sampling = []
            if key.greedy is False:
                sampling = [self._sampling[chunk.rank, chunk.slot] for chunk in plan.chunks]
            step = _InFlight(plan, sampling, drawn)
            after = -1 if self._order is None else self._order.last_decoded(plan.chunks)
            step.number = self._commands.start(key, packed, after, step.receive)
            if self._order is not None:
                self._order.add(plan.chunks, step.number)
        return step

    def collect_draws(self, handle: object) -> DrawResult:
        """Wait for the draws before a step and return what they drew."""
        assert isinstance(handle, _InFlight)
        assert handle.drawn is not None
        drawn = handle.drawn
        with self._timeline.span("wait"):
            tokens, logprobs = np.asarray(drawn.output.tokens), _fetch(drawn.output.logprobs)
        at = [(draw.rank, row) for draw, row in zip(handle.plan.draws, drawn.rows)]
        result = DrawResult([int(tokens[one]) for one in at])
        for index, sampling in enumerate(drawn.sampling):
            if logprobs is not None and sampling.logprobs is not None:
                result.logprobs[index] = [_read(logprobs, at[index], result.tokens[index], sampling.logprobs)]
        return result

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and return the results of its chunks."""
        assert isinstance(handle, _InFlight)
        self._commands.store_arrived()
        if handle.number is None:
            return StepResult(tokens=[], logprobs={}, prompt_logprobs={})
        self._commands.finish(handle.number)
        output = handle.output
        assert output is not None
        with self._timeline.span("wait"):
            tokens = None if output.tokens is None else np.asarray(output.tokens)
            logprobs = _fetch(output.logprobs)
            prompt_logprobs = _fetch(output.prompt_logprobs)
            vectors = None if output.pooled is None else np.asarray(output.pooled)
            self._expert_tokens.record(output.expert_tokens)
        with self._timeline.span("commit"):
            chunks = handle.plan.chunks
            pooled = {} if vectors is None else _pooled(vectors, chunks, by_token=self._capacity.pools_by_token)
            if tokens is None:
                return StepResult(tokens=[[] for _ in chunks], logprobs={}, prompt_logprobs={}, pooled=pooled)
            rows = _by_chunk(tokens, chunks)
            compared: list[tuple[int, int]] = []
            if self._capacity.max_drafts:
                compared = [(row[-2], row[-1]) for row in rows]
                rows = [row[: 1 + row[-1]] if chunk.tokens is None and chunk.length > 1 else row[:1]
                        for row, chunk in zip(rows, chunks)]  # fmt: skip
            drawn = [row if chunk.sample else [] for row, chunk in zip(rows, chunks)]
            result = StepResult(tokens=drawn, logprobs={}, prompt_logprobs={}, drafts=compared, pooled=pooled)
            if logprobs is not None or prompt_logprobs is not None:
                self._add_logprobs(result, handle, logprobs, prompt_logprobs)
            return result

    def _add_logprobs(
        self, result: StepResult, handle: _InFlight, logprobs: Logprobs | None, prompt_logprobs: Logprobs | None
    ) -> None:
        rows = [0] * self._capacity.num_ranks
        starts = [0] * self._capacity.num_ranks
        for i, (chunk, sampling) in enumerate(zip(handle.plan.chunks, handle.sampling)):
            rank, row = chunk.rank, rows[chunk.rank]
            if logprobs is not None and sampling.logprobs is not None and (tokens := result.tokens[i]):
                at = [(rank, row, j) if logprobs.chosen.ndim > 2 else (rank, row) for j in range(len(tokens))]
                result.logprobs[i] = [_read(logprobs, *found, sampling.logprobs) for found in zip(at, tokens)]
            if prompt_logprobs is not None and sampling.prompt_logprobs is not None:
                result.prompt_logprobs[i] = _prompt_logprobs(
                    prompt_logprobs, chunk, starts[rank], sampling.prompt_logprobs
                )
            rows[rank] += 1
            starts[rank] += chunk.length

    def _prepare(self, plan: StepPlan) -> None:
        """Run the commands that precede the step itself: copies of pages, then the opening of slots."""
        for group, sources, targets in self._split_copies(plan.saves):
            self._commands.save(group, sources, targets)
        for group, sources, targets in self._split_copies(plan.loads):
            self._commands.load(group, targets, sources)
        self._open(plan.opens)

    def _draw(self, draws: list[Draw]) -> _DrawsInFlight:
        """Start the program that draws within grammars."""
        key, packed, rows = pack_draws(draws, self._capacity)
        after = -1 if self._order is None else self._order.last_of(draws)
        output: DrawOutput = self._commands.run(key, packed, after)
        sampling = [self._sampling[draw.rank, draw.slot] for draw in draws]
        if all(one.logprobs is None for one in sampling):
            output = dataclasses.replace(output, logprobs=None)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return _DrawsInFlight(rows, sampling, output)

    def _draft(self, plan: StepPlan) -> None:
        """Run the programs of a draft model that precede the step."""
        if plan.draft_reads:
            after = -1 if self._order is None else self._order.last_of(plan.draft_reads)
            self._commands.run(*pack_reads(plan.draft_reads, self._capacity), after)
        if plan.draft_steps:
            after = -1 if self._order is None else self._order.last_decoded(plan.chunks)
            self._commands.run(*pack_drafts(plan, self._capacity), after)

    def _split_copies(self, copies: list[PageCopy]) -> Iterator[tuple[int, Pages, Pages]]:
        """Split copies into commands; yields the KV group of a command, and its sources and targets by rank."""
        for group in range(num_groups(self._capacity)):
            by_rank: list[list[PageCopy]] = [[] for _ in range(self._capacity.num_ranks)]
            for copy in copies:
                if copy[0] == group:
                    by_rank[copy[1]].append(copy)
            most = pages_per_copy(self._capacity, group)
            for at in range(0, max(map(len, by_rank)), most):
                some = [own[at : at + most] for own in by_rank]
                yield group, [[one[2] for one in own] for own in some], [[one[3] for one in own] for own in some]

    def _open(self, opens: list[SlotOpen]) -> None:
        """Open slots; a command opens a group of slots of each rank."""
        by_rank: list[list[SlotOpen]] = [[] for _ in range(self._capacity.num_ranks)]
        for opened in opens:
            self._sampling[opened.rank, opened.slot] = opened.sampling
            by_rank[opened.rank].append(opened)
        self._update(UPDATE_KEY, [pack_updates(opened, self._capacity) for opened in by_rank])
        self._update(ADJUST_KEY, map(pack_adjustments, by_rank))
        if self._capacity.max_drafts:
            self._update(READ_PROMPTS_KEY, map(pack_prompts, by_rank))

    def _update(self, key: ProgramKey, by_rank: Iterable[Iterator[np.ndarray]]) -> None:
        """Run a program that opens slots, as often as the rank with most inputs needs it."""
        nothing = KINDS[key.kind].packing(self._capacity, key).pack({})
        for packed in itertools.zip_longest(*by_rank, fillvalue=nothing):
            self._commands.run(key, np.stack(packed))


def _without_unwanted(output: StepOutput, sampling: list[SamplingParams]) -> StepOutput:
    """Leave out log probabilities that no chunk wants, as each array is a transfer."""
    logprobs, prompt_logprobs = output.logprobs, output.prompt_logprobs
    if logprobs is not None and all(one.logprobs is None for one in sampling):
        logprobs = None
    if prompt_logprobs is not None and all(one.prompt_logprobs is None for one in sampling):
        prompt_logprobs = None
    return dataclasses.replace(output, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _fetch(logprobs: Logprobs | None) -> Logprobs | None:
    return None if logprobs is None else jax.tree.map(np.asarray, logprobs)


def _by_chunk(values: np.ndarray, chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return each chunk's row of `values`, which are by rank and row."""
    if len(values) == 1:
        return values[0].tolist()[: len(chunks)]
    rows = [iter(row) for row in values.tolist()]
    return [next(rows[chunk.rank]) for chunk in chunks]


def _pooled(vectors: np.ndarray, chunks: Sequence[Chunk], *, by_token: bool) -> dict[int, bytes]:
    """Return the vectors of pooled chunks, by index, from those by rank and row, or by rank and token."""
    found, starts = {}, [0] * len(vectors)
    for i, chunk in enumerate(chunks):
        start = starts[chunk.rank]
        starts[chunk.rank] = end = start + (chunk.length if by_token else 1)
        if chunk.pooled:
            found[i] = vectors[chunk.rank, start:end].tobytes()
    return found


def _read(logprobs: Logprobs, at: tuple[int, ...], token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        token,
        float(logprobs.chosen[at]),
        logprobs.top_ids[at][:count].tolist(),
        logprobs.top[at][:count].tolist(),
    )


def _prompt_logprobs(logprobs: Logprobs, chunk: Chunk, start: int, count: int) -> list[TokenLogprobs]:
    """Return the log probabilities of the prompt tokens that follow each position of the chunk."""
    following = (chunk.tokens or [])[1:] + ([] if chunk.target is None else [chunk.target])
    return [_read(logprobs, (chunk.rank, start + i), token, count) for i, token in enumerate(following)]
