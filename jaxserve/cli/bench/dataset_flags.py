"""Flags of the benchmark datasets, under vLLM's and SGLang's names.

A flag that belongs to a dataset other than the chosen one is an error, because it would have no effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxserve.bench.datasets import trace
from jaxserve.bench.datasets.choice import DATASETS, FILES, NUM_PROMPTS, RANDOM, Dataset
from jaxserve.bench.datasets.lengths import SEMANTICS
from jaxserve.cli.common.parser import Parser
from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    kind: Any
    default: Any
    help: str
    datasets: tuple[str, ...]


def _ratio(text: str) -> dict[str, float]:
    try:
        value = json.loads(text)
        both = value if isinstance(value, dict) else {"input": value, "output": value}
        return {"input": float(both["input"]), "output": float(both["output"])}
    except (ValueError, TypeError, KeyError):
        raise argparse.ArgumentTypeError(
            f'{text!r} is neither a number nor like {{"input": 0.2, "output": 0.1}}'
        ) from None


_FLAGS = {
    "dataset-path": _Flag(Path, None, "the file to read", FILES),
    "random-input-len": _Flag(int, 1024, "tokens of a prompt", RANDOM),
    "random-output-len": _Flag(int, 128, "tokens of an answer", RANDOM),
    "random-range-ratio": _Flag(
        _ratio, {"input": 0.0, "output": 0.0},
        'spread of the lengths, see --random-range-semantics; or {"input": R, "output": R} (default 0)', RANDOM),
    "random-range-semantics": _Flag(
        str, "vllm", "meaning of the ratio R for a length L: " + "; ".join(f"{k}: {v}" for k, v in SEMANTICS.items()),
        RANDOM),
    "random-prefix-len": _Flag(int, 0, "tokens of a shared prefix, in addition to --random-input-len", RANDOM),
    "vocab-size": _Flag(int, None, "draw ids below this; no tokenizer is needed then", ("random-ids", "timed-trace")),
    "sharegpt-output-len": _Flag(int, None, "tokens of an answer, instead of the file's lengths", ("sharegpt",)),
    "custom-output-len": _Flag(int, 256, "tokens of an answer if the line has no output_tokens", ("custom",)),
    "disable-shuffle": _Flag(None, False, "keep the order of the file", ("custom",)),
    "no-oversample": _Flag(None, False, "never repeat prompts of a short file", ("sharegpt", "custom")),
    "prefix-repetition-prefix-len": _Flag(int, 256, "tokens of a prefix", ("prefix-repetition",)),
    "prefix-repetition-suffix-len": _Flag(int, 256, "tokens after the prefix", ("prefix-repetition",)),
    "prefix-repetition-num-prefixes": _Flag(int, 10, "number of prefixes", ("prefix-repetition",)),
    "prefix-repetition-output-len": _Flag(int, 128, "tokens of an answer", ("prefix-repetition",)),
    "gsp-num-groups": _Flag(int, 64, "number of system prompts", ("generated-shared-prefix",)),
    "gsp-prompts-per-group": _Flag(int, 16, "questions per system prompt", ("generated-shared-prefix",)),
    "gsp-system-prompt-len": _Flag(int, 2048, "tokens of a system prompt", ("generated-shared-prefix",)),
    "gsp-question-len": _Flag(int, 128, "tokens of a question", ("generated-shared-prefix",)),
    "gsp-output-len": _Flag(int, 256, "tokens of an answer", ("generated-shared-prefix",)),
    "gsp-ordered": _Flag(None, False, "send group after group instead of shuffled", ("generated-shared-prefix",)),
    "multi-turn-num-turns": _Flag(int, 5, "prompts of a conversation", ("multi-turn",)),
    "multi-turn-input-len": _Flag(int, 128, "tokens of each prompt (without --dataset-path)", ("multi-turn",)),
    "multi-turn-output-len": _Flag(int, 128, "tokens of each answer", ("multi-turn",)),
    "multi-turn-system-len": _Flag(int, 0, "tokens of a shared system prompt", ("multi-turn",)),
    "multi-turn-delay-ms": _Flag(float, 0.0, "pause between an answer and the next prompt", ("multi-turn",)),
    "timed-trace-chunk-hash-size": _Flag(
        int, trace.TOKENS_PER_HASH, "tokens per hash id", ("timed-trace",)),
    "timed-trace-sec-multiplier": _Flag(
        float, trace.SECONDS_PER_TICK, "seconds per unit of the timestamps", ("timed-trace",)),
}  # fmt: skip
_MAY_BE_ZERO = ("random-prefix-len", "prefix-repetition-prefix-len", "multi-turn-system-len")
_INPUT_LEN = {"random": "random-input-len", "random-ids": "random-input-len", "multi-turn": "multi-turn-input-len"}
_OUTPUT_LEN = {
    "random": "random-output-len",
    "random-ids": "random-output-len",
    "sharegpt": "sharegpt-output-len",
    "custom": "custom-output-len",
    "prefix-repetition": "prefix-repetition-output-len",
    "generated-shared-prefix": "gsp-output-len",
    "multi-turn": "multi-turn-output-len",
}


def add_datasets(parser: Parser) -> None:
    """Add the flags of all datasets."""
    group = parser.add_argument_group("dataset")
    names = "; ".join(f"{name}: {what}" for name, what in DATASETS.items())
    group.add_argument("--dataset-name", metavar="NAME", type=_name, default="random", choices=tuple(DATASETS),
                       help=f"{names} (default random)")  # fmt: skip
    group.add_argument("--num-prompts", type=int, metavar="N",
                       help=f"number of requests (default {NUM_PROMPTS}; traces and gsp have their own)")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals (default 0)")
    group.add_argument("--input-len", type=int, metavar="N", help="input length, instead of the dataset's own flag")
    group.add_argument("--output-len", type=int, metavar="N", help="output length, instead of the dataset's own flag")
    for name, flag in _FLAGS.items():
        if flag.kind is None:
            group.add_argument(f"--{name}", action="store_true", default=None, help=flag.help)
            continue
        shown = "" if flag.default is None or isinstance(flag.default, dict) else f" (default {flag.default})"
        choices = tuple(SEMANTICS) if name == "random-range-semantics" else None
        metavar = {int: "N", float: "X", Path: "FILE", _ratio: "R"}.get(flag.kind)
        group.add_argument(f"--{name}", type=flag.kind, metavar=metavar, choices=choices, help=flag.help + shown)


def chosen_dataset(arguments: argparse.Namespace, *, chat: bool) -> Dataset:
    """Return the dataset that the flags choose. Raises `ConfigError`."""
    name = arguments.dataset_name
    given = {flag: getattr(arguments, flag.replace("-", "_")) for flag in _FLAGS}
    for flag, value in given.items():
        if value is not None and name not in _FLAGS[flag].datasets:
            raise ConfigError(f"--{flag} has no effect with --dataset-name {name}: leave it out")
    for general, names in (("input_len", _INPUT_LEN), ("output_len", _OUTPUT_LEN)):
        value = getattr(arguments, general)
        if value is None:
            continue
        if name not in names or given[names[name]] is not None:
            why = "its own flag is given too" if name in names else f"--dataset-name {name} has its own lengths"
            raise ConfigError(f"--{general.replace('_', '-')}: {why}; leave it out")
        given[names[name]] = value
    values = {
        flag: _FLAGS[flag].default if value is None else value
        for flag, value in given.items()
        if name in _FLAGS[flag].datasets
    }
    _check(name, values, arguments.num_prompts, chat)
    return Dataset(name, {"dataset-path": None, **values}, arguments.num_prompts, arguments.seed, chat)


def _check(name: str, values: dict[str, Any], num_prompts: int | None, chat: bool) -> None:
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {num_prompts}")
    if name in FILES and name != "multi-turn" and values["dataset-path"] is None:
        raise ConfigError(f"--dataset-name {name} reads a file: name it with --dataset-path")
    if name == "random-ids" and chat:
        raise ConfigError("--dataset-name random-ids sends token ids, which chat routes don't accept: use random")
    for flag, value in values.items():
        lowest = 0 if flag in _MAY_BE_ZERO else 1
        if _FLAGS[flag].kind is int and value is not None and value < lowest:
            raise ConfigError(f"--{flag} must be at least {lowest}, got {value}")
        if _FLAGS[flag].kind is float and value < 0:
            raise ConfigError(f"--{flag} must not be below 0, got {value:g}")


def _name(text: str) -> str:
    """Accept underscores too: vLLM writes some names with them."""
    return text.replace("_", "-")
