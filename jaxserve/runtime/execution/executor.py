"""Runs step plans on the device: one packed transfer and one program a step, results fetched asynchronously."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxserve.api_types import SamplingParams, TokenLogprobs
from jaxserve.observability.timeline import Timeline
from jaxserve.runtime.execution.device_commands import Calls
from jaxserve.runtime.programs.builder import CompileCounter
from jaxserve.runtime.step import batch as batches
from jaxserve.runtime.step.page_copies import PAGES_A_COPY
from jaxserve.runtime.step.sampling import Logprobs
from jaxserve.runtime.step.slot_update import UPDATE, pack_open
from jaxserve.runtime.step.step import StepOutput
from jaxserve.step_plan import Capacity, Chunk, Copy, SlotOpen, StepPlan, StepResult

_NOTHING_TO_OPEN = UPDATE.pack({"slot": [-1]})


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched step. `sampling[i]` is that of chunk i's request: its slot may be another's by `collect`."""

    plan: StepPlan
    sampling: list[SamplingParams]
    output: StepOutput


class DeviceExecutor:
    """Turns plans into calls of programs, in the order of `dispatch`; if one raises, the state is gone for good.

    `timeline` gets the spans of a step's phases. `fitting` says which program runs in the place of one that
    could not be had. `compiles_elsewhere` counts those of the mesh's other processes.
    """

    def __init__(
        self,
        calls: Calls,
        capacity: Capacity,
        timeline: Timeline | None = None,
        fitting: Callable[[batches.ProgramKey], batches.ProgramKey] = lambda key: key,
        compiles_elsewhere: Callable[[], int] = int,
    ) -> None:
        self._calls = calls
        self._capacity = capacity
        self._timeline = timeline or Timeline()
        self._fitting = fitting
        self._sampling: dict[tuple[int, int], SamplingParams] = {}
        self._compiles = CompileCounter()
        self._compiles_elsewhere = compiles_elsewhere

    @property
    def capacity(self) -> Capacity:
        """What the programs hold."""
        return self._capacity

    @property
    def compiles_after_ready(self) -> int:
        """Compiles since this executor was made, in all processes of its mesh; anything but zero is a bug."""
        return self._compiles.count + self._compiles_elsewhere()

    def rehearse(self) -> None:
        """Run a step without requests: the first exchange between processes, before anybody waits for it."""
        nothing = StepPlan(opens=[], chunks=[], closes=[], num_decodes=0, greedy=True)
        self.collect(self.dispatch(nothing))

    def dispatch(self, plan: StepPlan) -> _InFlight:
        """Copy pages, open slots, then start the step; waits for nothing but pages to load that are on their way to
        the host."""
        if plan.opens or plan.saves or plan.loads:
            with self._timeline.span("dispatch"):
                self._prepare(plan)
        with self._timeline.span("build"):
            key = self._fitting(batches.choose_program(plan, self._capacity))
            packed = batches.build(plan, batches.step_shape(key, self._capacity), self._capacity)
        with self._timeline.span("dispatch"):
            output = self._calls.step(key, packed)
            for array in jax.tree.leaves(output):
                array.copy_to_host_async()
        return _InFlight(plan, [self._sampling[chunk.rank, chunk.slot] for chunk in plan.chunks], output)

    def collect(self, handle: object) -> StepResult:
        """Wait for a step and hand out what each chunk got."""
        assert isinstance(handle, _InFlight)
        self._calls.take_arrived()
        with self._timeline.span("wait"):
            tokens = np.asarray(handle.output.tokens)
            logprobs = _fetch(handle.output.logprobs)
            prompt_logprobs = _fetch(handle.output.prompt_logprobs)
        with self._timeline.span("commit"):
            return self._result(handle, tokens, logprobs, prompt_logprobs)

    def _result(
        self, handle: _InFlight, tokens: np.ndarray, logprobs: Logprobs | None, prompt_logprobs: Logprobs | None
    ) -> StepResult:
        result = StepResult(tokens=[], logprobs={}, prompt_logprobs={})
        ids: list[list[int]] = tokens[:, :, 0].tolist()
        rows = [0] * self._capacity.num_ranks
        starts = [0] * self._capacity.num_ranks
        for i, (chunk, sampling) in enumerate(zip(handle.plan.chunks, handle.sampling)):
            rank, row = chunk.rank, rows[chunk.rank]
            token = [ids[rank][row]] if chunk.sample else []
            result.tokens.append(token)
            if logprobs is not None and token and sampling.logprobs is not None:
                result.logprobs[i] = [_read(logprobs, (rank, row), token[0], sampling.logprobs)]
            if prompt_logprobs is not None and sampling.prompt_logprobs is not None:
                result.prompt_logprobs[i] = _of_prompt(prompt_logprobs, chunk, starts[rank], sampling.prompt_logprobs)
            rows[rank] += 1
            starts[rank] += chunk.length
        return result

    def _prepare(self, plan: StepPlan) -> None:
        """What comes before the step itself: copies of pages, then slots that open."""
        for copies in self._by_call(plan.saves):
            self._calls.save(_packed_pages(_sources(copies)), _targets(copies))
        for copies in self._by_call(plan.loads):
            self._calls.load(_packed_pages(_targets(copies)), _sources(copies))
        self._open(plan.opens)

    def _by_call(self, copies: list[Copy]) -> Iterator[list[list[Copy]]]:
        """For each call, as many of each rank's as it copies."""
        by_rank: list[list[Copy]] = [[] for _ in range(self._capacity.num_ranks)]
        for copy in copies:
            by_rank[copy[0]].append(copy)
        for at in range(0, max(map(len, by_rank)), PAGES_A_COPY):
            yield [own[at : at + PAGES_A_COPY] for own in by_rank]

    def _open(self, opens: list[SlotOpen]) -> None:
        """Open slots, one of each rank in a call."""
        vectors: list[list[np.ndarray]] = [[] for _ in range(self._capacity.num_ranks)]
        for opened in opens:
            self._sampling[opened.rank, opened.slot] = opened.sampling
            vectors[opened.rank] += pack_open(opened)
        for packed in itertools.zip_longest(*vectors, fillvalue=_NOTHING_TO_OPEN):
            self._calls.update(np.stack(packed))


def _sources(copies: list[list[Copy]]) -> list[list[int]]:
    return [[source for _, source, _ in own] for own in copies]


def _targets(copies: list[list[Copy]]) -> list[list[int]]:
    return [[target for _, _, target in own] for own in copies]


def _packed_pages(pages: list[list[int]]) -> np.ndarray:
    packed = np.full((len(pages), PAGES_A_COPY), -1, np.int32)
    for row, own in zip(packed, pages):
        row[: len(own)] = own
    return packed


def _fetch(logprobs: Logprobs | None) -> Logprobs | None:
    return None if logprobs is None else jax.tree.map(np.asarray, logprobs)


def _read(logprobs: Logprobs, at: tuple[int, int], token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        token,
        float(logprobs.chosen[at]),
        logprobs.top_ids[at][:count].tolist(),
        logprobs.top[at][:count].tolist(),
    )


def _of_prompt(logprobs: Logprobs, chunk: Chunk, start: int, count: int) -> list[TokenLogprobs]:
    """Those of the tokens that follow each position of the chunk and are part of the prompt."""
    following = (chunk.tokens or [])[1:] + ([] if chunk.target is None else [chunk.target])
    return [_read(logprobs, (chunk.rank, start + i), token, count) for i, token in enumerate(following)]
