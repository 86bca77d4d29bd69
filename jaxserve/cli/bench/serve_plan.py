"""Checks the flags of `jaxserve bench serve` before anything is sent."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np

from jaxserve.api_types import SHARED_OPTIONS
from jaxserve.bench.datasets.choice import Dataset
from jaxserve.bench.datasets.prompts import BenchConversation
from jaxserve.bench.load.arrivals import RampUp, arrival_times
from jaxserve.bench.load.backends import BACKENDS, CHAT, RequestWriter
from jaxserve.bench.load.target_server import TargetServer, parse_base_url
from jaxserve.cli.bench.dataset_flags import chosen_dataset
from jaxserve.cli.bench.serve_flags import pairs
from jaxserve.errors import ConfigError

# Separates the random numbers of arrivals from those of the datasets.
_ARRIVALS = 2


@dataclasses.dataclass(frozen=True)
class BenchPlan:
    """The checked flags of a run."""

    arguments: argparse.Namespace
    server: TargetServer
    dataset: Dataset
    ramp_up: RampUp | None
    headers: dict[str, str]
    metadata: dict[str, str]

    @property
    def endpoint(self) -> str:
        """The route of the requests."""
        given: str | None = self.arguments.endpoint
        return given or BACKENDS[self.arguments.backend]

    @property
    def uses_trace_times(self) -> bool:
        """Whether requests are sent at the dataset's own times."""
        asked: bool | None = self.arguments.self_timed
        return self.dataset.timed if asked is None else asked

    def describe_arrivals(self) -> str:
        """Return a description of the arrivals."""
        arguments = self.arguments
        if self.uses_trace_times:
            return "at the trace's times"
        if self.ramp_up is not None:
            return f"{self.ramp_up.start:g} to {self.ramp_up.end:g} requests/s, {self.ramp_up.strategy}"
        if math.isinf(arguments.request_rate):
            return "all at once"
        return f"{arguments.request_rate:g} requests/s, burstiness {arguments.burstiness:g}"

    def start_times(self, conversations: Sequence[BenchConversation]) -> list[float]:
        """Return the start time of each conversation, in seconds since the start of the run."""
        if self.uses_trace_times:
            return [conversation.at or 0.0 for conversation in conversations]
        rng = np.random.default_rng([self.arguments.seed, _ARRIVALS])
        rate, burstiness = self.arguments.request_rate, self.arguments.burstiness
        return arrival_times(rng, len(conversations), rate, burstiness=burstiness, ramp_up=self.ramp_up)

    def writer(self, model: str) -> RequestWriter:
        """Return the writer of requests for a model of this name."""
        arguments, chat = self.arguments, self.dataset.chat
        fields = {name: value for name in SHARED_OPTIONS if (value := getattr(arguments, name)) is not None}
        if arguments.ignore_eos or self.dataset.timed:
            fields["ignore_eos"] = True
        if (logprobs := arguments.logprobs) is not None:
            fields |= {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}
        path, authority = self.server.path(self.endpoint), self.server.authority
        return RequestWriter(path, authority, model, chat, self.headers, fields, arguments.extra_body)


def make_bench_plan(arguments: argparse.Namespace) -> BenchPlan:
    """Check the flags and return the plan. Raises `ConfigError`."""
    for flag in ("request_timeout", "stall_timeout"):
        if not getattr(arguments, flag) > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0 seconds, got {getattr(arguments, flag):g}")
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {arguments.max_concurrency}")
    if arguments.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {arguments.num_warmups}")
    if not 0 < arguments.port < 65536:
        raise ConfigError(f"--port must be from 1 to 65535, got {arguments.port}")
    chat = BACKENDS[arguments.backend] == CHAT
    dataset = chosen_dataset(arguments, chat=chat)
    if arguments.self_timed is not None and not dataset.timed:
        raise ConfigError(f"--self-timed: --dataset-name {dataset.name} has no arrival times; only timed-trace has")
    ramp_up = _ramp_up(arguments)
    arrival_times(np.random.default_rng(), 1, arguments.request_rate, burstiness=arguments.burstiness, ramp_up=ramp_up)
    headers = pairs("--header", arguments.header)
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers = {"Authorization": f"Bearer {key}", **headers}
    for name, value in headers.items():
        if not (name + value).isprintable() or not (name + value).isascii():
            raise ConfigError(f"the header {name!r} has characters that can't be sent: only printable ASCII can")
    server = parse_base_url(arguments.base_url) if arguments.base_url else TargetServer(arguments.host, arguments.port)
    return BenchPlan(arguments, server, dataset, ramp_up, headers, pairs("--metadata", arguments.metadata))


def _ramp_up(arguments: argparse.Namespace) -> RampUp | None:
    strategy, start, end = arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
    if strategy is None and start is None and end is None:
        return None
    if strategy is None or start is None or end is None:
        raise ConfigError("a ramp-up needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(arguments.request_rate):
        raise ConfigError("--request-rate and a ramp-up both set the rate: keep one")
    return RampUp(strategy, start, end)
