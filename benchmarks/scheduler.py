"""Measures the real scheduler on synthetic traces with a simulated device: host time per step, and the effect of the
settings in the tuning guides.

It prints three tables: milliseconds of plan, build and commit by batch size and queue; for each trace and policy the
cache usage, hit rate, retractions and waiting times; the same for values of `--schedule-conservativeness`. Seconds of
traces are simulated: a step takes 8 ms, plus 20 us per decode and 60 us per prefill token.

    python benchmarks/scheduler.py --json benchmarks/results/cpu/scheduler.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.cli.common.table import format_records
from jaxserve.engine.scheduling.policy import Policy
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.speculation.speculation import Speculation
from jaxserve.runtime.step.batch import choose_program, pack_step, step_shape
from jaxserve.runtime.step.buckets import decode_buckets, token_buckets
from jaxserve.step_plan import Capacity, StepPlan, StepResult, WindowGroup

PAGE, STOP, TOKEN = 16, 2, 17
POOL = 48_000


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a trace: its arrival time, and the number of tokens it generates before its stop token."""

    at: float
    prompt: list[int]
    max_tokens: int
    outputs: int


def uniform(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield prompts of 32 to 512 tokens that share nothing."""
    for i in range(count):
        outputs = rng.randint(16, 128)
        yield Arrival(i * 0.013, _ids(rng, rng.randint(32, 512)), outputs, outputs)


def shared_prefix(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield 64 unique tokens after one of 200 system prompts of 512 tokens."""
    systems = [_ids(rng, 512) for _ in range(200)]
    for i in range(count):
        yield Arrival(i * 0.006, rng.choice(systems) + _ids(rng, 64), 48, 48)


def multi_turn(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield chats of five turns of 64 tokens in and out, with the turns of all chats mixed."""
    chats: list[list[int]] = []
    for i in range(count):
        if not chats or len(chats) < 300:
            chats.append([])
        chat = rng.choice(chats)
        chat += _ids(rng, 64)
        yield Arrival(i * 0.008, list(chat), 64, 64)
        chat += [TOKEN] * 64
        if len(chat) > 600:
            chats.remove(chat)


def long_context(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield prompts of 64 tokens, with 6,000 in every eighth."""
    for i in range(count):
        yield Arrival(i * 0.08, _ids(rng, 6000 if i % 8 == 0 else 64), 64, 64)


def early_stop(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield requests for 1,024 tokens that stop after 20 to 120."""
    for i in range(count):
        yield Arrival(i * 0.011, _ids(rng, 128), 1024, rng.randint(20, 120))


def full_length(rng: random.Random, count: int) -> Iterator[Arrival]:
    """Yield short prompts that generate all of the 128 to 900 requested tokens."""
    for i in range(count):
        outputs = rng.randint(128, 900)
        yield Arrival(i * 0.04, _ids(rng, rng.randint(16, 128)), outputs, outputs)


TRACES: dict[str, Callable[[random.Random, int], Iterator[Arrival]]] = {
    "uniform": uniform,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "long-context": long_context,
    "early-stop": early_stop,
    "full-length": full_length,
}


def _ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(100, 30_000), k=count)


def capacity_of(slots: int, tokens: int, num_ranks: int = 1) -> Capacity:
    """Return the program sizes of an accelerator, with `slots` and a pool of `tokens` on each rank."""
    return Capacity(
        num_slots=slots,
        num_pages=tokens // PAGE,
        page_size=PAGE,
        max_model_len=8192,
        decode_buckets=decode_buckets(slots, max_fine=160, requested=None),
        token_buckets=token_buckets(2048, smallest=256),
        prompt_logprob_tokens=2 * slots,
        fine_decode_rows=160,
        num_ranks=num_ranks,
    )


def scheduler_of(capacity: Capacity, **settings: Any) -> Scheduler:
    """Create a scheduler as the worker does."""
    limits = dict.fromkeys(("chunked_prefill_size", "max_prefill_tokens", "max_num_batched_tokens"), 2048)
    return Scheduler(capacity, **limits, **settings)


def request_of(number: int, prompt: list[int], max_tokens: int) -> EngineRequest:
    """Return a greedy request."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=f"r{number}", prompt_ids=prompt, sampling=sampling, stop_ids=(STOP,))


def simulate(trace: str, count: int, num_ranks: int = 1, **settings: Any) -> dict[str, Any]:
    """Run a trace to its end in simulated time and return its figures. Ranks share slots and pool evenly."""
    capacity = capacity_of(256 // num_ranks, POOL // num_ranks, num_ranks)
    now = 0.0
    scheduler = scheduler_of(capacity, clock=lambda: now, **settings)
    left: dict[str, int] = {}
    waits: list[float] = []
    usages: list[float] = []
    running: list[int] = []
    arrivals = enumerate(TRACES[trace](random.Random(0), count))
    upcoming = next(arrivals, None)
    in_flight: list[tuple[StepPlan, StepResult]] = []
    started = time.perf_counter()
    steps = 0
    while upcoming is not None or scheduler.has_work:
        while upcoming is not None and upcoming[1].at <= now:
            number, arrival = upcoming
            request = request_of(number, arrival.prompt, arrival.max_tokens)
            left[request.request_id] = arrival.outputs
            assert scheduler.add(request) is None
            upcoming = next(arrivals, None)
        plan = scheduler.plan()
        if plan is not None:
            in_flight.append((plan, answer(plan, left)))
            now += max(step_seconds(plan, rank) for rank in range(num_ranks))
            steps += 1
        elif not in_flight:
            assert upcoming is not None, "the scheduler is stuck"
            now = max(now, upcoming[1].at)
            continue
        if plan is None or len(in_flight) > 1:
            for event in scheduler.commit(*in_flight.pop(0)):
                if event.queue_seconds is not None:
                    waits.append(event.queue_seconds)
        if scheduler.num_waiting:
            stats = scheduler.stats()
            usages.append(stats.token_usage)
            running.append(stats.num_running)
    assert scheduler.check_integrity() == []
    assert len(waits) == count, (len(waits), count)
    stats = scheduler.stats()
    return {
        "trace": trace,
        **settings,
        "simulated_s": now,
        "output_tok_s": stats.generation_tokens / now,
        "usage_while_queued": statistics.fmean(usages) if usages else None,
        "running_while_queued": statistics.fmean(running) if running else None,
        "hit_rate": stats.cache_hit_tokens / stats.cache_query_tokens,
        "retractions": stats.num_preemptions,
        "decode_padding": 1.0 - stats.decode_rows / max(stats.decode_bucket_rows, 1),
        "mixed_padding": 1.0 - stats.mixed_tokens / max(stats.mixed_bucket_tokens, 1),
        "queue_s_median": statistics.median(waits),
        "queue_s_p99": statistics.quantiles(waits, n=100)[98],
        "host_us_per_step": 1e6 * (time.perf_counter() - started) / steps,
    }


def step_seconds(plan: StepPlan, rank: int) -> float:
    """Return the simulated seconds of a step on a rank."""
    decodes = sum(chunk.rank == rank for chunk in plan.chunks[: plan.num_decodes])
    prefilled = sum(chunk.length for chunk in plan.chunks[plan.num_decodes :] if chunk.rank == rank)
    return 8e-3 + 2e-5 * decodes + 6e-5 * prefilled


def answer(plan: StepPlan, left: dict[str, int], *, drafts: bool = False) -> StepResult:
    """Return a step's result: each request gets tokens up to its number in the trace, then its stop token.

    With `drafts`, requests have no end, and half of the verified drafts are accepted.
    """
    if drafts:
        verified = [chunk.length - 1 if chunk.tokens is None else 0 for chunk in plan.chunks]
        tokens = [[TOKEN] * (1 + count // 2) if chunk.sample else [] for count, chunk in zip(verified, plan.chunks)]
        compared = [(max(1, count), count // 2) for count in verified]
        return StepResult(tokens=tokens, logprobs={}, prompt_logprobs={}, drafts=compared)
    tokens = []
    for chunk in plan.chunks:
        if not chunk.sample:
            tokens.append([])
            continue
        left[chunk.request_id] -= 1
        tokens.append([STOP if left[chunk.request_id] < 0 else TOKEN])
    return StepResult(tokens=tokens, logprobs={}, prompt_logprobs={})


def step_costs(
    num_running: int,
    num_waiting: int,
    window: int | None = None,
    drafts: int = 0,
    prompt: int = 0,
    steps: int = 1000,
) -> dict[str, float]:
    """Return median milliseconds of a decode step's parts, planned one step ahead, with `num_waiting` in the queue.

    With a `window`, there is a second KV group, whose pages requests give up while they run. With `drafts`, each
    request has a draft of as many tokens, of which half are accepted when some are verified. With a `prompt`, each step
    also computes one of as many tokens, whose request ends with its first token.
    """
    slots = num_running + (4 if prompt else 0)
    capacity = capacity_of(slots, slots * (48 + steps * (1 + drafts // 2) + 64))
    if window is not None:
        groups = (WindowGroup(num_running * (window // PAGE + 2), window),)
        capacity = msgspec.structs.replace(capacity, window_groups=groups)
    speculation = None
    if drafts:
        buckets = token_buckets(min(256, num_running * (1 + drafts)), smallest=8)
        capacity = msgspec.structs.replace(capacity, verify_buckets=buckets, max_drafts=drafts)
        speculation = Speculation(capacity)
    scheduler = scheduler_of(capacity, policy="lpm", conservativeness=0.0, speculation=speculation)
    for i in range(num_running + num_waiting):
        scheduler.add(request_of(i, list(range(i, i + 32 + i % PAGE)), 4096))  # a part of them needs pages in each step
    times: dict[str, list[float]] = {"plan": [], "build": [], "commit": []}
    in_flight: StepPlan | None = None
    endless: dict[str, int] = collections.defaultdict(lambda: 1 << 40)
    for number in itertools.count(num_running + num_waiting):
        if len(times["plan"]) == steps:
            break
        if prompt:
            scheduler.add(request_of(number, [number] * prompt, 1))
        start = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None
        pack_step(plan, step_shape(choose_program(plan, capacity), capacity), capacity)
        built = time.perf_counter()
        result = answer(in_flight, endless, drafts=drafts > 0) if in_flight is not None else None
        before = time.perf_counter()
        if in_flight is not None and result is not None:
            scheduler.commit(in_flight, result)
        committed = time.perf_counter()
        if plan.num_decodes == num_running:
            times["plan"].append(planned - start)
            times["build"].append(built - planned)
            times["commit"].append(committed - before)
        in_flight = plan
    total = [sum(parts) for parts in zip(*times.values())]
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    groups = 1 if window is None else 2
    sizes = {"running": num_running, "waiting": num_waiting, "groups": groups, "drafts": drafts, "prompt": prompt}
    return {**sizes, **medians, "together": 1e3 * statistics.median(total)}


def match_cost(tokens: int = 8192, repeats: int = 200) -> float:
    """Return the median milliseconds to match a cached prompt of `tokens` tokens in a tree of several prompts."""
    scheduler = scheduler_of(capacity_of(8, 64 * tokens))
    [rank] = scheduler._ranks
    cache, pool = rank.cache, rank.pool
    rng = random.Random(0)
    prompts = [_ids(rng, tokens) for _ in range(16)]
    for prompt in prompts:
        for cut in (tokens // 2, tokens):  # each prompt is two nodes of the tree
            cache.insert("", prompt[:cut], pool.allocate(cut // PAGE), 0)
    times = []
    for i in range(repeats):
        prompt = list(prompts[i % 16])
        start = time.perf_counter()
        _, pages = cache.match("", prompt, tokens)
        times.append(time.perf_counter() - start)
        assert len(pages) * PAGE == tokens
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=4000, help="requests of each run over a trace")
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("jaxserve").setLevel(logging.ERROR)  # hides the log line of each retraction
    report: dict[str, Any] = {"requests": args.requests, "pool_tokens": POOL}
    report["step_ms"] = [
        step_costs(n, waiting, window) for n in (16, 64, 256, 1024) for waiting in (0, 10_000) for window in (None, 256)
    ]
    report["step_ms"] += [step_costs(n, 0, drafts=4) for n in (16, 64, 256)]
    report["step_ms"] += [step_costs(n, 0, drafts=n_drafts, prompt=100) for n in (16, 64, 256) for n_drafts in (0, 4)]
    report["match_8k_ms"] = match_cost()
    print(format_records(report["step_ms"]))
    print(f"\nradix match of an 8,192-token prompt: {report['match_8k_ms']:.3f} ms\n")
    report["policies"] = [
        simulate(trace, args.requests, policy=policy) for trace in args.traces for policy in get_args(Policy)
    ]
    print(format_records(report["policies"]), end="\n\n")
    values = (0.1, 0.3, 1.0, 1.3)
    report["conservativeness"] = [
        simulate(trace, args.requests, policy="fcfs", conservativeness=value)
        for trace, value in itertools.product(("early-stop", "full-length"), values)
    ]
    print(format_records(report["conservativeness"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
