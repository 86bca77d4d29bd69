"""`jaxserve bench throughput`: measures the highest throughput of the engine in this process on a dataset.

There is no HTTP, and all requests are submitted at once. Answers have the lengths of the dataset.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxserve.api_types import SamplingParams
from jaxserve.bench.datasets.prompts import BenchConversation, DatasetPrompt
from jaxserve.cli.bench.dataset_flags import add_datasets, chosen_dataset
from jaxserve.cli.bench.report import write_json
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_table
from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.served_tokenizer import load_served_tokenizer

if TYPE_CHECKING:
    from jaxserve.llm import LLM, RequestOutput

_SERVED_ONLY = ("multi-turn", "timed-trace")


def parser() -> Parser:
    """Return the parser of `jaxserve bench throughput`."""
    parser = Parser(prog="jaxserve bench throughput", description=__doc__)
    add_datasets(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default 0)")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N",
                       help="unmeasured requests of the same kind before the run (default 1)")  # fmt: skip
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures to this file")
    flags.add_settings(parser, hidden=("seed",))
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return the exit code."""
    arguments = parser().parse(argv)
    if arguments.num_warmups < 0:
        raise ConfigError(f"--num-warmups must be at least 0, got {arguments.num_warmups}")
    if arguments.dataset_name in _SERVED_ONLY:
        raise ConfigError(f"--dataset-name {arguments.dataset_name} needs a server: use `jaxserve bench serve`")
    dataset = chosen_dataset(arguments, chat=False)
    loaded = flags.config_from_arguments(arguments)
    settings = flags.llm_arguments(loaded)
    vocabulary = dataset.vocabulary(load_served_tokenizer(loaded.engine))
    prompts = _single_prompts(dataset.make(vocabulary))
    warmups = _single_prompts(dataset.make(vocabulary, warmups=arguments.num_warmups)) if arguments.num_warmups else []

    from jaxserve.llm import LLM

    with LLM(**settings) as llm:
        if warmups:
            _generate(llm, warmups, arguments.temperature, use_tqdm=False)
        start = time.perf_counter()
        outputs = _generate(llm, prompts, arguments.temperature, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - start
    figures = _figures(outputs, seconds)
    print(_report(loaded.engine.model, dataset.describe(), figures))
    if arguments.output_json is not None:
        about = {"model_id": loaded.engine.model, "dataset": dataset.describe(), "seed": arguments.seed}
        write_json(arguments.output_json, figures | about)
    return 0


def _single_prompts(conversations: Sequence[BenchConversation]) -> list[DatasetPrompt]:
    """Return the prompts of conversations of one prompt each."""
    return [prompt for conversation in conversations for prompt in conversation.prompts]


def _generate(llm: LLM, prompts: Sequence[DatasetPrompt], temperature: float, *, use_tqdm: bool) -> list[RequestOutput]:
    params = [
        SamplingParams(max_tokens=prompt.output_tokens, temperature=temperature, ignore_eos=True) for prompt in prompts
    ]
    # Only datasets of `bench serve` have prompts of chat messages.
    contents = cast("list[str | Sequence[int]]", [prompt.content for prompt in prompts])
    return llm.generate(contents, params, use_tqdm=use_tqdm)


def _figures(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    """Return the figures under the key names of vLLM's `bench throughput`; the engine counts the tokens."""
    inputs = sum(output.usage.prompt_tokens for output in outputs)
    answers = sum(output.usage.completion_tokens for output in outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": inputs + answers,
        "total_input_tokens": inputs,
        "total_output_tokens": answers,
        "total_cached_tokens": sum(output.usage.cached_tokens for output in outputs),
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (inputs + answers) / seconds,
        "output_tokens_per_second": answers / seconds,
    }


def _report(model: str, dataset: str, figures: dict[str, Any]) -> str:
    """Return the result as text."""
    rows = [
        ["requests", str(figures["num_requests"]), f"{figures['requests_per_second']:.2f}"],
        ["prompt tokens", str(figures["total_input_tokens"]), ""],
        ["  from the prefix cache", str(figures["total_cached_tokens"]), ""],
        ["output tokens", str(figures["total_output_tokens"]), f"{figures['output_tokens_per_second']:.2f}"],
        ["all tokens", str(figures["total_num_tokens"]), f"{figures['tokens_per_second']:.2f}"],
    ]
    head = ["", f"in {figures['elapsed_time']:.2f} s", "a second"]
    return f"{model}: {dataset}\n\n{format_table(head, rows)}"
