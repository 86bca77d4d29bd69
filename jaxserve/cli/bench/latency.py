"""`jaxserve bench latency`: measures the latency of one batch of equal requests in the engine process, without HTTP.

Prefill lasts until every sequence has its first token; decode is the rest. Each iteration has new random prompts, so
that the prefix cache has no hits. `--breakdown` profiles where the time of a step goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.bench.engine.one_batch import BatchTimes, run_batch
from jaxserve.bench.engine.step_times import ProfiledSteps, read_step_times
from jaxserve.cli.bench.breakdown import breakdown
from jaxserve.cli.bench.report import write_json
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table
from jaxserve.config.data_parallel import require_single_process
from jaxserve.config.model_files import model_files
from jaxserve.config.schema import EngineConfig
from jaxserve.config.served_checkpoint import read_served_checkpoint
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.engine.client import EngineClient

PERCENTILES = (10, 25, 50, 75, 90, 99)


def parser() -> Parser:
    """Return the parser of `jaxserve bench latency`."""
    parser = Parser(prog="jaxserve bench latency", description=__doc__)
    group = parser.add_argument_group("batch")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at once (default 8)")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (default 32)")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    group.add_argument("--num-iters", type=int, default=30, metavar="N", help="measured iterations (default 30)")
    group.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="warm-up iterations (default 10)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default 0)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the prompts (default 0)")
    group.add_argument("--breakdown", action="store_true", help="profile one more batch: where a step's time goes")
    group.add_argument("--breakdown-steps", type=int, default=64, metavar="N",
                       help="profile the first N steps of that batch (default 64)")  # fmt: skip
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures to this file")
    flags.add_settings(parser, hidden=("seed",))
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    arguments = parser().parse(argv)
    for name, low in _MINIMUMS.items():
        if (value := getattr(arguments, name)) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    loaded = flags.config_from_arguments(arguments)
    log_level = flags.llm_arguments(loaded).get("log_level", "warning")
    config = require_single_process(msgspec.structs.replace(loaded.engine, log_level=log_level), "bench latency")
    if not read_served_checkpoint(config, model_files(config)).task.generates:
        raise ConfigError(f"bench latency measures answers, and {config.model} is served for vectors or labels only")
    with _profiles(config) if arguments.breakdown else contextlib.nullcontext(config) as config:
        measured = asyncio.run(_measure(arguments, config))
    print(measured.report())
    if arguments.output_json is not None:
        write_json(arguments.output_json, measured.as_json())
    return 0


_MINIMUMS = {
    "batch_size": 1,
    "input_len": 1,
    "output_len": 1,
    "num_iters": 1,
    "num_iters_warmup": 0,
    "breakdown_steps": 1,
}


@dataclasses.dataclass(frozen=True)
class _LatencyResult:
    arguments: argparse.Namespace
    model: str
    times: list[BatchTimes]
    steps: ProfiledSteps | None

    def report(self) -> str:
        """Return the result as text."""
        given = self.arguments
        rows = [
            [name, *(f"{1e3 * value:.2f}" for value in _spread(values).values())]
            for name, values in self._phases().items()
        ]
        head = ["milliseconds", *_spread([0.0])]
        parts = [
            f"{self.model}: {given.batch_size} sequences, {given.input_len} tokens in, {given.output_len} out, "
            f"{given.num_iters} times",
            format_table(head, rows),
        ]
        return "\n\n".join(parts if self.steps is None else [*parts, breakdown(self.steps)])

    def as_json(self) -> dict[str, Any]:
        """Return the figures in seconds, under the key names of vLLM's `bench latency`, and the phases."""
        latencies = [one.latency for one in self.times]
        phases = {
            name: {"values": values, **_spread(values)} for name, values in self._phases().items() if name != "latency"
        }
        result: dict[str, Any] = {
            "avg_latency": float(np.mean(latencies)),
            "latencies": latencies,
            "percentiles": {str(point): float(np.percentile(latencies, point)) for point in PERCENTILES},
            "model_id": self.model,
            "phases": phases,
        }
        result |= {name: getattr(self.arguments, name) for name in ("batch_size", "input_len", "output_len", "seed")}
        return result if self.steps is None else result | {"breakdown": dataclasses.asdict(self.steps)}

    def _phases(self) -> dict[str, list[float]]:
        """Return the seconds of each iteration by phase."""
        phases = {
            "latency": [one.latency for one in self.times],
            "prefill": [one.prefill for one in self.times],
        }
        if self.arguments.output_len > 1:
            phases["decode"] = [one.decode for one in self.times]
            phases["decode, a token"] = [one.decode / (self.arguments.output_len - 1) for one in self.times]
        return phases


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values))} | {
        f"p{point}": float(np.percentile(values, point)) for point in PERCENTILES
    }


@contextlib.contextmanager
def _profiles(config: EngineConfig) -> Iterator[EngineConfig]:
    """Yield the configuration with a folder for profiles: the one given, or a temporary one."""
    if config.profile_dir is not None:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="jaxserve-profile-") as folder:
        yield msgspec.structs.replace(config, profile_dir=folder)


async def _measure(arguments: argparse.Namespace, config: EngineConfig) -> _LatencyResult:
    from jaxserve.engine.client import EngineClient

    engine = await EngineClient.launch(config)
    try:
        _check_fits(arguments, engine)
        rng, vocabulary = np.random.default_rng(arguments.seed), Vocabulary(None, engine.info.vocab_size)

        async def once(name: str) -> BatchTimes:
            prompts = [vocabulary.ids(rng, arguments.input_len) for _ in range(arguments.batch_size)]
            return await run_batch(
                engine, prompts, name=name, output_len=arguments.output_len, temperature=arguments.temperature
            )

        for i in range(arguments.num_iters_warmup):
            await once(f"warmup-{i}")
        times = [await once(f"batch-{i}") for i in range(arguments.num_iters)]
        steps = None
        if arguments.breakdown:
            await engine.start_profile(num_steps=arguments.breakdown_steps)
            await once("profiled")
            steps = read_step_times(Path((await engine.stop_profile()).directory))
    finally:
        await engine.shutdown()
    return _LatencyResult(arguments, config.model, times, steps)


def _check_fits(arguments: argparse.Namespace, engine: EngineClient) -> None:
    tokens, info = arguments.input_len + arguments.output_len, engine.info
    if tokens > info.max_model_len:
        raise ConfigError(
            f"--input-len and --output-len make {tokens} tokens; the context is {info.max_model_len} (--context-length)"
        )
    if arguments.batch_size > info.max_running_requests:
        raise ConfigError(
            f"--batch-size is {arguments.batch_size}; at most {info.max_running_requests} sequences run at once "
            "(--max-running-requests)"
        )
    if arguments.batch_size * tokens > info.max_total_num_tokens:
        raise ConfigError(
            f"the batch has {arguments.batch_size * tokens} tokens; the KV cache holds {info.max_total_num_tokens} "
            "(--max-total-tokens, --mem-fraction-static)"
        )
