"""The advice of the tuning guides, as rules over samples of a server's metrics.

Each rule looks at the samples and returns its advice with the figures that led to it, or None. The rules are pure
functions, without network or clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from jaxserve.observability.draft_rules import drafts_rejected, drafts_unused
from jaxserve.observability.sample import Sample, Settings
from jaxserve.observability.stage_rules import stages_without_requests, uneven_stages
from jaxserve.observability.tuning_advice import AdviceRule, TuningAdvice

GOOD_USAGE = 0.9
UNEVEN_USAGE = 0.6
LONG_QUEUE = 2000
LPM_QUEUE = 128
"""With more requests waiting, lpm serves them first come, first served."""
FREQUENT_SHARE = 0.5
"""Something is frequent if it holds in at least this share of the busy samples."""
MIN_BUSY = 3
MUCH_LEFT = 10 * 2**30
"""With at least this many bytes free, the KV cache should be larger."""
FEW_HITS = 0.01
MANY_TOKENS = 10_000
"""The hit rate of the prefix cache is judged from this many prompt tokens on."""
COARSE_SHARE = 0.1
PADDING_SHARE = 0.35


def apply_rules(samples: Sequence[Sample], settings: Settings) -> list[TuningAdvice]:
    """Return the advice of every rule that applies, most severe first."""
    return [advice for rule in RULES if (advice := rule(samples, settings)) is not None]


def busy_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples in which requests were running or waiting."""
    return [sample for sample in samples if sample.running or sample.waiting]


def engine_ended(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if the server has stopped serving; running out of memory has its own advice."""
    problem = samples[-1].problem
    if problem is None:
        return None
    if "RESOURCE_EXHAUSTED" in problem or "out of memory" in problem.lower():
        return TuningAdvice(
            "out of memory",
            problem,
            "Lower --mem-fraction-static (to 0.8 or 0.7): less KV cache leaves more for everything else. Out of memory "
            "while prompts are computed: lower --chunked-prefill-size to 4096 or 2048. While decoding: lower "
            "--max-running-requests.",
        )
    return TuningAdvice("not serving", problem, "Read the end of the server's log: it says why.")


def compiled_while_serving(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if programs were compiled after the server was ready, which should never happen."""
    count = samples[-1].compiles_after_ready
    if not count:
        return None
    return TuningAdvice(
        "compiles while serving",
        f"{count} programs were compiled after the server was ready",
        "That should be impossible, and each one is a pause for every request: please report it as a bug.",
    )


def frequent_retractions(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if requests were retracted more than about once a minute."""
    count = samples[-1].retractions - samples[0].retractions
    seconds = _seconds(samples)
    if count <= max(1.0, seconds / 60):
        return None
    more_room = "raise --mem-fraction-static, or lower --max-running-requests"
    conservativeness = settings.schedule_conservativeness
    if conservativeness is not None and conservativeness >= 1.3:
        what_to_do = f"--schedule-conservativeness is {conservativeness:g} already: {more_room}."
    else:
        what_to_do = f"Raise --schedule-conservativeness to a value like 1.3{_now(conservativeness)}, or {more_room}."
    figure = (
        f"{count} requests were retracted in {seconds:.0f} s ({count / seconds * 60:.1f} a minute); median token usage "
        f"{_median(samples, lambda s: s.token_usage):.2f}"
    )
    return TuningAdvice("frequent retractions", figure, what_to_do)


def too_conservative(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if requests wait although the KV cache has room and slots are free."""
    seen = [s for s in busy_samples(samples) if s.waiting > s.deferred and s.token_usage < GOOD_USAGE]
    seen = [s for s in seen if s.running < s.max_running]
    if not _frequent(seen, samples):
        return None
    conservativeness = settings.schedule_conservativeness
    if conservativeness is not None and conservativeness <= 0.3:
        what_to_do = (
            f"--schedule-conservativeness is {conservativeness:g} already. Prompts may wait to be computed: try a "
            "larger --chunked-prefill-size."
        )
    else:
        what_to_do = (
            f"Lower --schedule-conservativeness to a value like 0.3{_now(conservativeness)}. This happens when "
            "requests ask for many max_tokens and stop early."
        )
    figure = (
        f"token usage was below {GOOD_USAGE:g} while requests waited for room {_in(seen, samples)}: median token usage "
        f"{_median(seen, lambda s: s.token_usage):.2f}, median queue {_median(seen, lambda s: s.waiting):.0f}, "
        f"new_token_ratio {_median(seen, lambda s: s.new_token_ratio):.2f}"
    )
    return TuningAdvice("too conservative", figure, what_to_do)


def uneven_kv_groups(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if requests wait because one kind of KV group is full while the other has much room."""
    seen = [
        s
        for s in busy_samples(samples)
        if s.waiting > s.deferred
        and max(s.full_token_usage, s.swa_token_usage) >= GOOD_USAGE
        and min(s.full_token_usage, s.swa_token_usage) < UNEVEN_USAGE
        and s.swa_token_usage
    ]
    if not _frequent(seen, samples):
        return None
    full, windows = (_median(seen, value) for value in (lambda s: s.full_token_usage, lambda s: s.swa_token_usage))
    figure = f"{_in(seen, samples)}: median full token usage {full:.2f}, swa token usage {windows:.2f}"
    if windows > full:
        return TuningAdvice(
            "windows full",
            f"the KV cache of layers with a window was full while whole sequences had room {figure}",
            "Raise --swa-full-tokens-ratio: requests are shorter than the memory was divided for.",
        )
    return TuningAdvice(
        "whole sequences full",
        f"the KV cache of whole sequences was full while layers with a window had room {figure}",
        "Lower --swa-full-tokens-ratio: requests are longer than the memory was divided for.",
    )


def slots_full(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if requests wait because all slots are taken, while memory is left."""
    seen = [s for s in busy_samples(samples) if s.waiting and s.running >= s.max_running and s.token_usage < GOOD_USAGE]
    if not _frequent(seen, samples):
        return None
    limit = seen[-1].max_running
    return TuningAdvice(
        "all slots taken",
        f"all {limit} slots were taken with memory left {_in(seen, samples)}: median token usage "
        f"{_median(seen, lambda s: s.token_usage):.2f}, median queue {_median(seen, lambda s: s.waiting):.0f}",
        f"Raise --max-running-requests (it is {_per_rank(limit, settings)}) for throughput; each request then takes a "
        "little longer.",
    )


def long_queue(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if the queue is so long that it slows the scheduler and every request waits long."""
    seen = [s for s in busy_samples(samples) if s.waiting > LONG_QUEUE]
    if not _frequent(seen, samples):
        return None
    return TuningAdvice(
        "queue too long",
        f"more than {LONG_QUEUE} requests waited {_in(seen, samples)}: median queue "
        f"{_median(seen, lambda s: s.waiting):.0f}",
        "Submit more slowly (100 to 2000 waiting is a healthy range), add replicas, or set --max-queued-requests.",
    )


def queue_beyond_lpm(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if the queue is too long for lpm to order it."""
    seen = [s for s in busy_samples(samples) if s.waiting > LPM_QUEUE]
    if settings.schedule_policy != "lpm" or not _frequent(seen, samples):
        return None
    return TuningAdvice(
        "queue beyond lpm's reach",
        f"more than {LPM_QUEUE} requests waited {_in(seen, samples)}: median queue "
        f"{_median(seen, lambda s: s.waiting):.0f}; past {LPM_QUEUE} the lpm policy is first come, first served",
        "If requests share prefixes, submit more slowly so that lpm can order them, or send those that share one "
        "together; if they share none, set --schedule-policy fcfs, which is what happens anyway.",
    )


def no_shared_prefixes(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if lpm orders the queue by prefix although hardly any prefixes are shared."""
    queried = samples[-1].queried_tokens - samples[0].queried_tokens
    hits = samples[-1].hit_tokens - samples[0].hit_tokens
    seen = [s for s in busy_samples(samples) if s.waiting]
    if settings.schedule_policy != "lpm" or queried < MANY_TOKENS or hits > FEW_HITS * queried:
        return None
    if not _frequent(seen, samples):
        return None
    return TuningAdvice(
        "no shared prefixes",
        f"{hits} of {queried} prompt tokens were found in the prefix cache, with requests waiting {_in(seen, samples)}",
        "Ordering requests by prefix gains nothing: try --schedule-policy fcfs, which is cheaper.",
    )


def memory_left_over(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if memory limits the KV cache although much memory is unused."""
    left = settings.free_bytes - settings.working_bytes
    if not settings.memory_bound or left < MUCH_LEFT:
        return None
    return TuningAdvice(
        "memory left over",
        f"{_gib(settings.free_bytes)} of each device were free once all was allocated (available_gpu_mem), of which "
        f"the programs take {_gib(settings.working_bytes)}; 5 to 8 GB are plenty",
        "Raise --mem-fraction-static, in steps of 0.01 when it gets close: the KV cache gets what is left.",
    )


def memory_short(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if less memory is free than the programs take, because another process uses it."""
    if not settings.free_bytes or settings.free_bytes >= settings.working_bytes:
        return None
    return TuningAdvice(
        "memory too short",
        f"{_gib(settings.free_bytes)} of each device were free once all was allocated (available_gpu_mem), and the "
        f"programs take {_gib(settings.working_bytes)} while they run",
        "Lower --mem-fraction-static: another process seems to use the device too, and this one may run out of memory.",
    )


def coarse_decode_programs(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if decode batches are often larger than the finely spaced programs."""
    coarse = samples[-1].coarse_decode_steps - samples[0].coarse_decode_steps
    steps = samples[-1].decode_steps - samples[0].decode_steps
    if not coarse or coarse < COARSE_SHARE * steps:
        return None
    most = max(sample.running for sample in samples)
    return TuningAdvice(
        "decode batches beyond --cuda-graph-max-bs",
        f"{coarse} of {steps} decode steps ran with 'cuda graph: False', up to {most} requests at once",
        f"Raise --cuda-graph-max-bs to {_per_rank(most, settings)} or more; more programs take a little memory, so "
        "lower --mem-fraction-static with it if memory is tight.",
    )


def padded_decodes(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if the decode programs were often much larger than their batches."""
    used = samples[-1].decode_used - samples[0].decode_used
    padding = samples[-1].decode_padding - samples[0].decode_padding
    if padding <= PADDING_SHARE * (used + padding):
        return None
    running = _median(busy_samples(samples) or samples, lambda s: s.running)
    return TuningAdvice(
        "padded decode batches",
        f"{padding / (used + padding):.0%} of the rows of the decode programs that ran were padding; the median number "
        f"of running requests was {running:.0f}",
        f"Add a size near {_per_rank(running, settings)} to --cuda-graph-bs, or raise --cuda-graph-max-bs if it is "
        "below that.",
    )


def client_too_slow(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if no request waits: the server serves as fast as the client sends."""
    seen = [s for s in busy_samples(samples) if not s.waiting]
    if not _frequent(seen, samples):
        return None
    return TuningAdvice(
        "the client is the bottleneck",
        f"the queue was empty {_in(seen, samples)}: median running requests {_median(seen, lambda s: s.running):.0f} "
        f"of {seen[-1].max_running}",
        "For more throughput submit requests faster: 100 to 2000 waiting is a healthy range. For low latency an empty "
        "queue is what you want.",
    )


RULES: tuple[AdviceRule, ...] = (
    engine_ended,
    compiled_while_serving,
    memory_short,
    frequent_retractions,
    too_conservative,
    uneven_kv_groups,
    slots_full,
    long_queue,
    queue_beyond_lpm,
    no_shared_prefixes,
    memory_left_over,
    coarse_decode_programs,
    padded_decodes,
    drafts_rejected,
    drafts_unused,
    uneven_stages,
    stages_without_requests,
    client_too_slow,
)


def _frequent(seen: Sequence[Sample], samples: Sequence[Sample]) -> bool:
    total = len(busy_samples(samples))
    return total >= MIN_BUSY and len(seen) >= FREQUENT_SHARE * total


def _in(seen: Sequence[Sample], samples: Sequence[Sample]) -> str:
    return f"in {len(seen)} of {len(busy_samples(samples))} samples with work"


def _per_rank(number: float, settings: Settings) -> str:
    """Return the share of one rank in a number of all ranks, as text: flags apply to each rank."""
    each = math.ceil(number / settings.num_ranks)
    return f"{each}" if settings.num_ranks == 1 else f"{each} a rank"


def _now(conservativeness: float | None) -> str:
    return "" if conservativeness is None else f" (it is {conservativeness:g})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GB"


def _median(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(value(sample) for sample in samples)


def _seconds(samples: Sequence[Sample]) -> float:
    return max(samples[-1].seconds - samples[0].seconds, 1e-9)
