"""`jaxserve bench serve`: sends load to any OpenAI-compatible server and measures latency and throughput."""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.datasets.choice import RANDOM
from jaxserve.bench.results.metrics import compute_figures
from jaxserve.cli.bench.report import as_json, describe_acceptance, report, write_json
from jaxserve.cli.bench.serve_flags import serve_parser
from jaxserve.cli.bench.serve_plan import BenchPlan, make_bench_plan
from jaxserve.cli.bench.serve_run import ServeResult, run_plan
from jaxserve.cli.common.dispatch import INTERRUPTED
from jaxserve.cli.common.parser import Parser


def parser() -> Parser:
    """Return the parser of `jaxserve bench serve`."""
    assert __doc__ is not None
    return serve_parser(__doc__)


def main(argv: list[str]) -> int:
    """Run the command; return 0, 1 if no request succeeded, or 130 if the run was interrupted."""
    plan = make_bench_plan(parser().parse(argv))
    measured = run_plan(plan)
    if measured is None:
        return INTERRUPTED
    _report(plan, measured)
    if measured.run.interrupted:
        return INTERRUPTED
    return 0 if any(record.status == "ok" for record in measured.run.records) else 1


def _report(plan: BenchPlan, measured: ServeResult) -> None:
    """Print the result and write the requested files."""
    arguments, run = plan.arguments, measured.run
    figures = compute_figures(
        run, goodput=dict(arguments.goodput), metrics=arguments.percentile_metrics,
        percentiles=arguments.metric_percentiles,
    )  # fmt: skip
    at_once = "any number" if arguments.max_concurrency is None else f"at most {arguments.max_concurrency}"
    about = {
        "server": f"{plan.server.url}, {plan.server.path(plan.endpoint)}, model {measured.model}",
        "dataset": f"{plan.dataset.describe()}, seed {arguments.seed}",
        "load": f"{len(run.records)} requests, {plan.describe_arrivals()}, {at_once} open",
    }
    if measured.parts is not None:
        about["prompts"] = measured.parts.describe()
    if measured.acceptance is not None:
        about["drafts"] = describe_acceptance(measured.acceptance)
    print(report(about, figures, run, arguments.metric_percentiles))
    now = datetime.datetime.now()
    keys = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label or arguments.backend,
        "model_id": measured.model,
        "tokenizer_id": measured.tokenizer,
        "num_prompts": len(run.records),
        "dataset": plan.dataset.describe(),
        "seed": arguments.seed,
        **plan.metadata,
        "request_rate": "inf" if math.isinf(arguments.request_rate) else arguments.request_rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    if plan.ramp_up is not None:
        keys |= {f"ramp_up_{key}": value for key, value in plan.ramp_up.as_json().items()}
    if plan.dataset.name in RANDOM:
        keys["random_range_semantics"] = plan.dataset.values["random-range-semantics"]
    if measured.parts is not None:
        keys |= measured.parts.as_json()
    if measured.acceptance is not None:
        keys |= measured.acceptance.as_json()
    for path, detailed in _files(arguments, keys):
        result = as_json(keys, figures, run, detailed=detailed, texts=arguments.save_generated_texts)
        write_json(path, result)
        print(f"written to {path}", file=sys.stderr)


def _files(arguments: argparse.Namespace, keys: dict[str, Any]) -> Iterator[tuple[Path, bool]]:
    """Yield the files to write, and whether each includes every request."""
    if arguments.output_json is not None:
        yield arguments.output_json, True
    if arguments.save_result or arguments.save_detailed or arguments.result_filename or arguments.result_dir:
        model = str(keys["model_id"]).rstrip("/").split("/")[-1]
        open_ = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
        name = f"{keys['label']}-{arguments.request_rate}qps{open_}-{model}-{keys['date']}.json"
        yield (arguments.result_dir or Path()) / (arguments.result_filename or name), arguments.save_detailed
