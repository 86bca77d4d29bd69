"""Which settings `bench tune` tries, from what was seen of the default: a small set, by the rules of the tuning guides.

A setting that can't matter for the load is left out, with the reason. Pure: it reads an observation, it runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.bench.sweep.grid import Options
from jaxserve.bench.tune.bucket_choice import choose_buckets
from jaxserve.errors import BenchRunError

KNOBS = (
    "max_running_requests",
    "chunked_prefill_size",
    "schedule_policy",
    "schedule_conservativeness",
    "cuda_graph_bs",
)


@dataclasses.dataclass(frozen=True)
class Observed:
    """A server after its runs. `peak_open` requests were open at once, with so many tokens in and out on average;
    `kv_tokens` is what its cache holds. `padding` is the share of decode rows that was."""

    peak_open: int
    mean_input: float
    mean_output: float
    max_running: int
    chunk: int
    kv_tokens: int
    preemptions: int
    policy: str
    conservativeness: float
    steps_by_rows: Mapping[int, int]
    padding: float


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Values of one setting to try, and why these, or why none."""

    knob: str
    values: tuple[Any, ...]
    why: str

    def settings(self) -> list[Options]:
        """One mapping for each value."""
        return [{self.knob: value} for value in self.values]


def observe(server_info: Mapping[str, Any], result: Mapping[str, Any]) -> Observed:
    """From /server_info after the runs, and one run's result. Raises `BenchRunError` when they say too little."""
    try:
        engine, stats, config = (server_info[key] for key in ("engine", "stats", "engine_config"))
        return Observed(
            peak_open=int(result["max_concurrent_requests"]),
            mean_input=result["total_input_tokens"] / result["completed"],
            mean_output=result["total_output_tokens"] / result["completed"],
            max_running=engine["max_running_requests"],
            chunk=engine["chunked_prefill_size"],
            kv_tokens=engine["max_total_num_tokens"],
            preemptions=stats["num_preemptions"],
            policy=engine["schedule_policy"],
            conservativeness=config["schedule_conservativeness"],
            steps_by_rows={int(rows): steps for rows, steps in stats["decode_steps_by_rows"].items()},
            padding=1.0 - stats["decode_rows"] / stats["decode_bucket_rows"] if stats["decode_bucket_rows"] else 0.0,
        )
    except (KeyError, TypeError) as error:
        raise BenchRunError(f"/server_info lacks {error}: this is not a jaxserve of this version") from None


def candidates(knob: str, seen: Observed, goal: str) -> Candidates:
    """What to try of one setting."""
    values, why = _RULES[knob](seen, goal)
    return Candidates(knob, tuple(values), why)


type Rule = tuple[list[Any], str]


def _max_running(seen: Observed, goal: str) -> Rule:
    running, peak = seen.max_running, seen.peak_open
    if peak > running:
        return [2 * running, max(1, running // 2)], f"{peak} requests were open at once, {running} may run"
    if peak > running // 2 and running > 1:
        return [running // 2], f"{peak} requests were open at once and all could run: fewer may be quicker"
    return [], f"at most {peak} requests were open at once, {running} may run"


def _chunk(seen: Observed, goal: str) -> Rule:
    most = seen.peak_open * seen.mean_input
    if most <= seen.chunk // 2:
        return [], f"all open prompts together ({most:.0f} tokens) fit into half a chunk of {seen.chunk}"
    smaller = max(16, seen.chunk // 2)
    if most <= seen.chunk:
        return [smaller], f"all open prompts together ({most:.0f} tokens) fit into a chunk of {seen.chunk}"
    return [2 * seen.chunk, smaller], f"prompts of {seen.mean_input:.0f} tokens, {seen.peak_open} at once"


def _policy(seen: Observed, goal: str) -> Rule:
    if seen.peak_open <= seen.max_running:
        return (
            [],
            f"at most {seen.peak_open} requests were open and {seen.max_running} may run: nobody waits in a queue",
        )
    known = ["lpm", "fcfs"] + (["shortest-prefill-first"] if goal == "latency" else [])
    return [policy for policy in known if policy != seen.policy], "requests wait, so their order counts"


def _conservativeness(seen: Observed, goal: str) -> Rule:
    if seen.preemptions:
        return [1.3 * max(seen.conservativeness, 1.0)], f"{seen.preemptions} requests were retracted"
    wanted = min(seen.peak_open, seen.max_running) * (seen.mean_input + seen.mean_output)
    if wanted <= seen.kv_tokens:
        return [], f"all that may run needs about {wanted:.0f} tokens of KV cache, which holds {seen.kv_tokens}"
    return [0.3 * seen.conservativeness], f"about {wanted:.0f} tokens want into a KV cache of {seen.kv_tokens}"


def _buckets(seen: Observed, goal: str) -> Rule:
    if not seen.steps_by_rows:
        return [], "no step was a decode alone"
    choice = choose_buckets(seen.steps_by_rows, seen.max_running)
    share = f"{choice.padding:.1%} of decode rows would be padding with {len(choice.buckets)} programs"
    if seen.padding - choice.padding < _LEAST_GAIN:
        return [], f"{share}; they were {seen.padding:.1%} with those there are"
    return [list(choice.buckets)], f"{share}, {seen.padding:.1%} was"


# Less padding saved than this is not worth compiling other programs for.
_LEAST_GAIN = 0.02
_RULES: Mapping[str, Callable[[Observed, str], Rule]] = dict(
    zip(KNOBS, (_max_running, _chunk, _policy, _conservativeness, _buckets))
)
