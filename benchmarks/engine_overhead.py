"""What the scheduling wing costs on the host for each decode step, by number of running requests.

Prints a table; `--json FILE` writes the figures too. There is no device in it: `plan` and `commit` are the scheduler's
two calls, `message` is packing the step's events for an API process and unpacking them there.

    .venv/bin/python benchmarks/engine_overhead.py --json benchmarks/results/cpu/engine_overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import msgspec

from jaxserve.api_types import EngineRequest, SamplingParams
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.transport import Message, StepEvents
from jaxserve.step_plan import Capacity, StepPlan, StepResult

PAGE_SIZE, PROMPT, STEPS = 16, 128, 2000


def _result(plan: StepPlan) -> StepResult:
    return StepResult(tokens=[[17] if chunk.sample else [] for chunk in plan.chunks], logprobs={}, prompt_logprobs={})


def measure(num_running: int, num_waiting: int) -> dict[str, float]:
    """Median milliseconds of each part of a decode step, one step ahead, with `num_waiting` in the queue."""
    length = PROMPT + STEPS + 10
    capacity = Capacity(
        num_slots=num_running,
        num_pages=num_running * (length // PAGE_SIZE + 1),
        page_size=PAGE_SIZE,
        max_model_len=length,
        decode_buckets=(num_running,),
        token_buckets=(num_running * PROMPT,),
        prompt_logprob_tokens=num_running + 1,
    )
    limit = num_running * PROMPT
    scheduler = Scheduler(capacity, chunked_prefill_size=limit, max_prefill_tokens=limit, max_num_batched_tokens=limit)
    sampling = SamplingParams(max_tokens=length, temperature=0.0)
    for i in range(num_running + num_waiting):
        scheduler.add(
            EngineRequest(
                request_id=f"cmpl-{i:032d}", prompt_ids=list(range(PROMPT)), sampling=sampling, stop_ids=(1, 2)
            )
        )
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)
    times: dict[str, list[float]] = {"plan": [], "commit": [], "message": []}
    in_flight = scheduler.plan()
    assert in_flight is not None
    for _ in range(STEPS):
        result = _result(in_flight)
        start = time.perf_counter()
        following = scheduler.plan()
        planned = time.perf_counter()
        events = scheduler.commit(in_flight, result)
        committed = time.perf_counter()
        decoder.decode(encoder.encode(StepEvents(events, scheduler.stats())))
        times["message"].append(time.perf_counter() - committed)
        times["plan"].append(planned - start)
        times["commit"].append(committed - planned)
        assert following is not None
        assert following.num_decodes == num_running
        in_flight = following
    milliseconds = {name: 1000 * statistics.median(values) for name, values in times.items()}
    total = [plan + commit for plan, commit in zip(times["plan"], times["commit"])]
    return {
        "running": num_running,
        "waiting": num_waiting,
        **milliseconds,
        "plan+commit": 1000 * statistics.median(total),
        "plan+commit p99": 1000 * statistics.quantiles(total, n=100)[98],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    rows = [measure(running, waiting) for running in (16, 64, 256) for waiting in (0, 10_000)]
    columns = list(rows[0])
    print("milliseconds a decode step (median)")
    print("  ".join(f"{column:>15}" for column in columns))
    for row in rows:
        print("  ".join(f"{row[c]:>15.0f}" if c in ("running", "waiting") else f"{row[c]:>15.4f}" for c in columns))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
