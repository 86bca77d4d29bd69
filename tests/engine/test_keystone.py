"""The keystone test of scheduling: a request's tokens are the same as when it runs alone, whatever else happens."""

from __future__ import annotations

import math
import random
from typing import get_args

import msgspec
import pytest
from llguidance import LLMatcher

from jaxserve.api_types import EngineRequest, FinishReason, SamplingParams, TokenEvent
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.kv_cache.eviction import EvictionPolicy
from jaxserve.engine.kv_cache.host_tier import WritePolicy
from jaxserve.engine.scheduling.admission import QueueLimits
from jaxserve.engine.scheduling.policy import Policy, RetractionPolicy
from jaxserve.engine.scheduling.priorities import Priorities
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.errors import QUEUE_LIMITS, QueueFullError
from jaxserve.step_plan import Capacity, WindowGroup
from tests.drafts import AnyLengths
from tests.engine.cache_subscriber import CacheSubscriber
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import VOCAB, FakeExecutor, run_alone
from tests.grammars import random_grammar, run_at_random, small_grammars
from tests.selection import FULL, grid
from tests.thinking import random_budget

pytestmark = pytest.mark.slow


def _prompt(rng: random.Random, length: int, earlier: list[EngineRequest], max_model_len: int) -> list[int]:
    """Make a new prompt, one that shares another's beginning, or the next turn of another (prompt plus answer)."""
    own = [rng.randrange(VOCAB) for _ in range(length)]
    if not earlier or rng.random() < 0.4:
        return own
    other = rng.choice(earlier)
    tokens = list(other.prompt_ids)
    if rng.random() < 0.5:
        tokens += run_alone(other, max_model_len).token_ids
    return [*tokens[: rng.randint(0, len(tokens))], *own[: rng.randint(1, length)]][: max_model_len - 1]


def _random_request(
    rng: random.Random, number: int, max_model_len: int, earlier: list[EngineRequest], constrained: float
) -> EngineRequest:
    prompt_length = min(rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, max_model_len)]), max_model_len - 1)
    max_tokens = rng.choice([0, 1, rng.randint(1, 8), rng.randint(8, 60), 60])
    stop_ids = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 0, 1, 6])))
    return EngineRequest(
        request_id=f"r{number}",
        thinking=random_budget(random.Random(number)) if number % 5 == 2 else None,
        prompt_ids=_prompt(rng, prompt_length, earlier, max_model_len),
        priority=rng.choice([None, 0, 1, 5]),
        namespace=rng.choice(["", "", "tenant"]),
        stop_ids=stop_ids,
        grammar=random_grammar(rng) if rng.random() < constrained else "",
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, min(3, max_tokens)]),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        ),
    )


def _with_pooled(requests: dict[str, EngineRequest], seed: int, max_model_len: int) -> dict[str, EngineRequest]:
    """Return the requests, of which in most seeds some are pooled, and a few are as long as the context."""
    rng = random.Random(f"pooled {seed}")
    share = 0.0 if seed % 10 == 9 else rng.choice([0.0, 0.2, 0.2, 0.8])
    found = dict(requests)
    for request_id, request in requests.items():
        if rng.random() < share:
            prompt = request.prompt_ids
            if rng.random() < 0.1:
                prompt = [rng.randrange(VOCAB) for _ in range(max_model_len)]
            found[request_id] = msgspec.structs.replace(
                request,
                pooled=True,
                prompt_ids=prompt,
                grammar="",
                thinking=None,
                sampling=SamplingParams(max_tokens=0, seed=request.sampling.seed),
            )
    return found


def _random_engine(
    rng: random.Random,
    limits: QueueLimits,
    *,
    tiered: bool,
    num_ranks: int,
    num_windows: int,
    speculates: bool,
    num_stages: int,
    states: bool,
    pools_all_tokens: bool,
    pooled_time_share: float,
    long_prefill_token_threshold: int,
    policies: random.Random,
) -> tuple[EngineLoop, Scheduler, FakeExecutor]:
    """Make a random engine; if `tiered`, with host memory and so few pages that most cached ones are evicted to it."""
    num_slots = rng.choice([1, 3] if tiered else [1, 3, 8, 8])
    page_size = rng.choice([1, 2, 4] if tiered else [1, 2, 4, 8])
    max_model_len = rng.randint(24, 48) if tiered else rng.randint(8, 48)
    fits = -(-max_model_len // page_size)
    windows = [rng.choice([1, 2, 5, rng.randint(1, max_model_len)]) for _ in range(num_windows)]
    fewest = [-(-(window - 1) // page_size) + 2 for window in windows]
    capacity = Capacity(
        window_groups=tuple(
            WindowGroup(few + rng.choice([0, 1, few, fits, fits * num_slots]), window)
            for few, window in zip(fewest, windows)
        ),
        num_slots=num_slots,
        num_pages=rng.choice([fits, fits + rng.randint(0, 4), *([] if tiered else [fits * 2, fits * num_slots])]),
        page_size=page_size,
        max_model_len=max_model_len,
        decode_buckets=(num_slots,),
        token_buckets=rng.choice([(16,), (4, 12, 32), (16, 64)]),
        prompt_logprob_tokens=num_slots + rng.randint(1, 8),
        num_ranks=num_ranks,
        num_stages=num_stages,
        pooled_size=1,
        pools_all_tokens=pools_all_tokens,
        rotation_length=rng.choice([None, None, rng.randint(4, max_model_len)]),
    )
    if speculates:
        drafts = rng.randint(1, 8)
        capacity = msgspec.structs.replace(capacity, max_drafts=drafts, verify_buckets=(num_slots * (1 + drafts),))
    if states:
        block = rng.choice([1, 2, 4, 8])
        num_states = num_slots + rng.choice([0, 1, 2, num_slots, 40])
        unit = math.lcm(block, page_size) * rng.choice([1, 1, 2])
        capacity = msgspec.structs.replace(capacity, num_states=num_states, state_unit=unit, state_block=block)
    scheduler = Scheduler(
        capacity,
        speculation=AnyLengths(capacity, random.Random(rng.randrange(100))) if speculates else None,
        chunked_prefill_size=rng.choice([1, 3, 8, 64]),
        max_prefill_tokens=rng.choice([4, 64]),
        max_num_batched_tokens=rng.choice([num_slots + 1, 64]),
        mixed_step_seconds=1e-9 if not tiered and capacity.num_pages % 8 == 0 else 0.0,
        pooled_time_share=pooled_time_share,
        long_prefill_token_threshold=long_prefill_token_threshold,
        limits=limits,
        policy=rng.choice(get_args(Policy)),
        priorities=Priorities(
            default=policies.choice([0, 3]),
            low_first=policies.random() < 0.5,
            threshold=policies.choice([None, 0, 0, 0, 2]),
        ),
        retraction_policy=policies.choice(get_args(RetractionPolicy)),
        prefill_max_requests=policies.choice([None, None, None, 1, 2]),
        eviction_policy=policies.choice(get_args(EvictionPolicy)),
        conservativeness=rng.choice([0.0, 0.0, 0.3, 1.0, 1.3]),
        prefix_cache=tiered or rng.random() < 0.9,
        num_host_pages=[
            rng.choice([fits, 2 * num_pages, 99 * fits] if tiered else [0, 2, 2 * fits])
            for num_pages in capacity.pages_by_group
        ],
        num_host_states=rng.choice([0, 1, 40]) if states else 0,
        state_snapshot_interval=rng.choice([0, 1, 7]) if states else 0,
        host_write_policy=rng.choice(get_args(WritePolicy)),
        record_cache_events=True,
        random_seed=rng.randrange(100),
        grammars=small_grammars(),
        overlap=(overlap := rng.random() < 0.7),
    )
    executor = FakeExecutor(capacity, overlap=overlap)
    loop = EngineLoop(scheduler, executor, overlap=overlap)
    return run_at_random(loop, random.Random(rng.randrange(100))), scheduler, executor


def _random_limits(seed: int) -> QueueLimits:
    """Return limits that refuse some requests, in one of ten runs."""
    rng = random.Random(f"limits {seed}")
    setting = rng.choice(list(QUEUE_LIMITS))
    most = 40 if setting == "max_num_queued_tokens" else 4
    return QueueLimits(**{setting: rng.randint(1, most)}) if seed % 10 == 9 else QueueLimits()


WITHOUT_STATES = [
    *((block, False, 1, 0, False) for block in range(16)),
    *((block, True, 1, 0, False) for block in range(8)),
    *((ranks, False, ranks, 0, False) for ranks in (2, 3, 4)),
    (2, True, 2, 0, False),
    *((block, block % 2 == 1, 1 + block % 2, 1 + block % 4 // 2, False) for block in range(16)),
    *((block, block % 2 == 1, 1 + block % 3 // 2, block % 4 // 2, True) for block in range(24)),
]
WITH_STATES = [
    *((block, block % 2 == 1, 1, 0, False) for block in range(16)),
    *((block, block % 2 == 1, 1 + block % 3 // 2, 0, True) for block in range(16)),
]
BLOCKS = [*((*block, False) for block in WITHOUT_STATES), *((*block, True) for block in WITH_STATES)]
CONSTRAINED = [(block, 0.5, *others) for block, *others in BLOCKS]
QUICK = (
    *((0, False, 1, 0, False, False), (0, True, 1, 0, False, False), (0, False, 1, 1, False, False)),
    *((1, True, 2, 1, False, False), (2, False, 2, 0, False, False), (0, False, 1, 0, True, False)),
    *((3, True, 1, 1, True, False), (0, False, 1, 0, False, True), (5, True, 2, 0, True, True)),
)


def _num_seeds(constrained: float, tiered: bool, num_ranks: int) -> int:
    """Fewer where a seed takes long: grammars, and several ranks, each of which has as many requests as one."""
    if constrained:
        return 20
    if FULL or num_ranks == 1:
        return 50
    return 12 if tiered else 20


QUICK_CONSTRAINED = QUICK[1], QUICK[4], QUICK[6], QUICK[7]


@pytest.mark.parametrize(
    ("block", "constrained", "tiered", "num_ranks", "num_windows", "speculates", "states"),
    [
        *grid([(block, 0.0, *others) for block, *others in BLOCKS], lambda case: (case[0], *case[2:]) in QUICK),
        *grid(CONSTRAINED, lambda case: (case[0], *case[2:]) in QUICK_CONSTRAINED),
    ],
)
def test_tokens_are_those_of_each_request_alone(
    block: int, constrained: float, tiered: bool, num_ranks: int, num_windows: int, speculates: bool, states: bool
) -> None:
    preempted = aborted_running = hits = loaded = num_refused = pooled = 0
    states_found = states_evicted = states_loaded = recomputed = 0
    for seed in range(block * 50, block * 50 + _num_seeds(constrained, tiered, num_ranks)):
        rng = random.Random(seed)
        loop, scheduler, executor = _random_engine(
            rng,
            _random_limits(seed),
            tiered=tiered,
            num_ranks=num_ranks,
            num_windows=num_windows,
            speculates=speculates,
            num_stages=random.Random(f"stages {seed}").choice([1, 1, 2, 4]),
            states=states,
            pools_all_tokens=seed % 2 == 0,
            pooled_time_share=random.Random(f"share {seed}").choice([0.01, 0.3, 1.0]),
            long_prefill_token_threshold=random.Random(f"long {seed}").choice([0, 0, 1, 5]),
            policies=random.Random(f"policies {seed}"),
        )
        max_model_len = executor.capacity.max_model_len
        requests: dict[str, EngineRequest] = {}
        for i in range(num_ranks * (rng.randint(10, 20) if tiered else rng.randint(1, 20))):
            # A few long conversations are found again after they have been evicted.
            earlier = list(requests.values())[: 4 if tiered else None]
            requests[f"r{i}"] = _random_request(rng, i, max_model_len, earlier, constrained)
        requests = _with_pooled(requests, seed, max_model_len)
        arrivals = list(requests.values())
        aborted: set[str] = set()
        refused: set[str] = set()
        events: dict[str, list[TokenEvent]] = {request_id: [] for request_id in requests}

        def receive(arrived: list[TokenEvent], events: dict[str, list[TokenEvent]] = events) -> None:
            for event in arrived:
                seen = events[event.request_id]
                assert not seen or seen[-1].finish_reason is None, "an event after the last one"
                seen.append(event)

        subscribers = [CacheSubscriber() for _ in range(num_ranks)]
        num_steps = 0
        while arrivals or loop.has_work:
            while arrivals and rng.random() < (0.1 * num_ranks if tiered else 0.5):
                if (refusal := loop.add(arrivals.pop(0))) is not None:
                    refused.add(refusal.request_id)
                    receive([refusal])
            if rng.random() < 0.05:
                target = rng.choice(list(requests))
                last = loop.abort([target, "nobody"])
                aborted.update(event.request_id for event in last)
                aborted_running += bool(last and events[target])
                receive(last)
            if rng.random() < 0.02:
                scheduler.flush_cache()
            receive(loop.step())
            assert scheduler.check_integrity() == []
            for subscriber, recorder in zip(subscribers, scheduler._recorders, strict=True):
                subscriber.receive(recorder.take())
                assert subscriber.hashes == recorder.hashes()
            num_steps += 1
            assert num_steps < 10_000, "no progress"
        stats = loop.stats(check=True)
        assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
        assert stats.num_running == stats.num_waiting == 0
        num_refused += len(refused)
        preempted += stats.num_preemptions
        hits += stats.cache_hit_tokens
        loaded += stats.host_load_pages
        states_found += stats.state_snapshots_found
        states_evicted += stats.state_snapshots_evicted
        states_loaded += sum(group == len(executor.capacity.pages_by_group) for group, *_ in executor.loads)
        recomputed += stats.state_recomputed_tokens
        assert stats.num_states_used == 0
        assert stats.cache_hit_tokens <= stats.cache_query_tokens
        scheduler.flush_cache()
        assert loop.stats(check=True).num_free_pages == stats.num_pages
        assert loop.stats().num_host_pages_used == loop.stats().num_state_snapshots == 0

        for request_id, request in requests.items():
            seen = events[request_id]
            if request_id in refused:
                assert [event.finish_reason for event in seen] == [FinishReason.ERROR]
                assert QueueFullError.from_text(seen[0].error or "")
                continue
            expected = run_alone(request, max_model_len)
            last_event = seen[-1]
            token_ids = [token for event in seen for token in event.token_ids]
            assert last_event.usage is not None
            assert last_event.usage.completion_tokens == len(token_ids)
            assert last_event.usage.prompt_tokens == len(request.prompt_ids)
            if request_id in aborted:
                assert last_event.finish_reason is FinishReason.ABORT
                assert token_ids == expected.token_ids[: len(token_ids)]
                continue
            assert last_event.finish_reason is expected.finish_reason, last_event
            assert last_event.pooled == expected.pooled
            pooled += expected.pooled is not None
            assert token_ids == expected.token_ids
            assert last_event.stop_id == expected.stop_id
            if expected.logprobs is not None:
                assert [entry for event in seen for entry in event.logprobs or []] == expected.logprobs
            assert seen[0].prompt_logprobs == expected.prompt_logprobs
            assert all(event.prompt_logprobs is None for event in seen[1:])
    # How long a grammar takes changes what happens, so that nothing certain can be asked of it
    assert preempted > 3 or constrained, "these seeds cause no retractions"
    assert num_refused or constrained, "these seeds refuse no requests"
    assert pooled > 20, "these seeds pool few requests"
    assert hits > (10 if states else 30) or constrained, "these seeds cause no cache hits"
    assert loaded > 2 or constrained or not tiered or states, "these seeds load nothing from host memory"
    if states and not constrained:
        assert min(states_found, states_evicted, recomputed) > 10, "these seeds hardly use snapshots of states"
        assert states_loaded > 0 or not tiered, "these seeds load no state from host memory"
    assert aborted_running > 0 or constrained, "these seeds abort no running request"


@pytest.mark.parametrize("regex", ["[a-c]{20}", "[a-c]{2}hellohello[a-c]{3}"])
@pytest.mark.parametrize("num_prompt_tokens", [1, 5, 6, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_with_grammars_grow_past_the_length_of_their_rotation(
    regex: str, num_prompt_tokens: int, overlap: bool
) -> None:
    capacity = make_capacity(rotation_length=6)
    scheduler = Scheduler(
        capacity,
        chunked_prefill_size=4,
        max_prefill_tokens=32,
        max_num_batched_tokens=64,
        grammars=small_grammars(),
    )
    loop = EngineLoop(scheduler, FakeExecutor(capacity), overlap=overlap)
    request = make_request("a", num_prompt_tokens, max_tokens=20, seed=0)
    request = msgspec.structs.replace(request, grammar=LLMatcher.grammar_from_regex(regex))

    assert loop.add(request) is None
    events = []
    for _ in range(200):
        events += loop.step()
        if not loop.has_work:
            break

    assert [token for event in events for token in event.token_ids] == run_alone(request, 64).token_ids
    assert events[-1].finish_reason is FinishReason.STOP
