"""Chooses the few values that `bench tune` tries, from the observed default run and the rules of the tuning guides.

A setting that can't matter for the load is skipped with a reason. The functions are pure: nothing runs here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.bench.sweep.grid import Options
from jaxserve.bench.tune.bucket_choice import choose_buckets
from jaxserve.errors import BenchRunError

TUNED_SETTINGS = (
    "max_running_requests",
    "chunked_prefill_size",
    "schedule_policy",
    "schedule_conservativeness",
    "cuda_graph_bs",
)


@dataclasses.dataclass(frozen=True)
class ObservedLoad:
    """The load and limits of a server after its runs. `peak_open` is the most requests open at once, `mean_input` and
    `mean_output` are tokens per request, `kv_tokens` the capacity of the KV cache, `padding` the share of padded decode
    rows (0 to 1)."""

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
    """The values of one setting to try, and the reason for them or for trying none."""

    setting: str
    values: tuple[Any, ...]
    why: str

    def changes(self) -> list[Options]:
        """Return one mapping for each value."""
        return [{self.setting: value} for value in self.values]


def observe(server_info: Mapping[str, Any], result: Mapping[str, Any]) -> ObservedLoad:
    """Read /server_info after the runs and one run's result. Raises `BenchRunError` if a field is missing."""
    try:
        engine, stats, config = (server_info[key] for key in ("engine", "stats", "engine_config"))
        return ObservedLoad(
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


def choose_candidates(setting: str, load: ObservedLoad, goal: str) -> Candidates:
    """Choose the values of one setting to try."""
    values, why = _RULES[setting](load, goal)
    return Candidates(setting, tuple(values), why)


type CandidateRule = tuple[list[Any], str]


def _max_running(load: ObservedLoad, goal: str) -> CandidateRule:
    running, peak = load.max_running, load.peak_open
    if peak > running:
        return [2 * running, max(1, running // 2)], f"{peak} requests were open at once, {running} may run"
    if peak > running // 2 and running > 1:
        return [running // 2], f"{peak} requests were open at once and all could run: fewer may be quicker"
    return [], f"at most {peak} requests were open at once, {running} may run"


def _chunk(load: ObservedLoad, goal: str) -> CandidateRule:
    most = load.peak_open * load.mean_input
    if most <= load.chunk // 2:
        return [], f"all open prompts together ({most:.0f} tokens) fit into half a chunk of {load.chunk}"
    smaller = max(16, load.chunk // 2)
    if most <= load.chunk:
        return [smaller], f"all open prompts together ({most:.0f} tokens) fit into a chunk of {load.chunk}"
    return [2 * load.chunk, smaller], f"prompts of {load.mean_input:.0f} tokens, {load.peak_open} at once"


def _policy(load: ObservedLoad, goal: str) -> CandidateRule:
    if load.peak_open <= load.max_running:
        return [], f"{load.peak_open} requests were open at once, {load.max_running} may run: the queue stays empty"
    known = ["lpm", "fcfs"] + (["shortest-prefill-first"] if goal == "latency" else [])
    return [policy for policy in known if policy != load.policy], "requests wait, so their order matters"


def _conservativeness(load: ObservedLoad, goal: str) -> CandidateRule:
    if load.preemptions:
        return [1.3 * max(load.conservativeness, 1.0)], f"{load.preemptions} requests were retracted"
    wanted = min(load.peak_open, load.max_running) * (load.mean_input + load.mean_output)
    if wanted <= load.kv_tokens:
        return [], f"the requests that may run need {wanted:.0f} of {load.kv_tokens} tokens of KV cache"
    return [0.3 * load.conservativeness], f"the requests that may run need {wanted:.0f} of {load.kv_tokens} tokens"


def _buckets(load: ObservedLoad, goal: str) -> CandidateRule:
    if not load.steps_by_rows:
        return [], "there was no step with decodes only"
    choice = choose_buckets(load.steps_by_rows, load.max_running)
    share = f"{choice.padding:.1%} of decode rows would be padding with {len(choice.buckets)} programs"
    if load.padding - choice.padding < _MIN_PADDING_SAVED:
        return [], f"{share}; it is {load.padding:.1%} with the present ones"
    return [list(choice.buckets)], f"{share}; it was {load.padding:.1%}"


# Saving less padding than this doesn't justify compiling other programs.
_MIN_PADDING_SAVED = 0.02
_RULES: Mapping[str, Callable[[ObservedLoad, str], CandidateRule]] = dict(
    zip(TUNED_SETTINGS, (_max_running, _chunk, _policy, _conservativeness, _buckets))
)
