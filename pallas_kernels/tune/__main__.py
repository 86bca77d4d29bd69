"""`python -m pallas_kernels.tune`: times candidate block sizes on the device at hand and writes its tuned table.

Each backend's file has a function `candidates`. Candidates that don't compile are skipped. The table keeps its entries
of other backends and problems. Without an accelerator it prints an error and exits with 1, unless
`--interpret-tiny` makes a dry run on the CPU, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.grouped_matmul import backends as expert_backends
from pallas_kernels.grouped_matmul import tuning as expert_tuning
from pallas_kernels.paged_attention import backends as attention_backends
from pallas_kernels.paged_attention import tuning as attention_tuning
from pallas_kernels.quantized_matmul import backends as product_backends
from pallas_kernels.quantized_matmul import tuning as product_tuning
from pallas_kernels.target import KernelTarget, target_of
from pallas_kernels.tune import attention, experts, products
from pallas_kernels.tune.task import Task
from pallas_kernels.tuning import device_name, read_entries, write_entries

# The modules of each kernel that choose its backend and read its tables.
KERNELS: dict[str, tuple[Any, Any]] = {
    "attention": (attention_backends, attention_tuning),
    "products": (product_backends, product_tuning),
    "experts": (expert_backends, expert_tuning),
}
BACKENDS = ("triton", "mosaic_gpu", "mosaic_tpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=KERNELS, default="attention", help="default: attention")
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="default: triton")
    parser.add_argument("--output", type=Path, help="the table to write; default: the device's in the package")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no new problem after this time; default: 30")
    parser.add_argument("--fp8", action="store_true", help="attention also with a KV cache of fp8")
    parser.add_argument("--interpret-tiny", action="store_true", help="a dry run on the CPU; needs --output")
    options = parser.parse_args(arguments)
    if options.fp8 and options.kernel != "attention":
        parser.error("--fp8 is an option of --kernel attention")
    target = target_of(jax.devices()[0])
    if options.interpret_tiny:
        if options.output is None:
            parser.error("--interpret-tiny needs --output: its times belong in no tuned table")
        target = KernelTarget("cpu")
    elif target.platform == "cpu":
        print("no accelerator is attached, and a CPU has no kernels to tune", file=sys.stderr)
        return 1
    backends, tuning = KERNELS[options.kernel]
    module = backends.BACKENDS.module(options.backend)
    if not hasattr(module, "candidates"):
        print(f"backend {options.backend!r} has no block sizes to tune", file=sys.stderr)
        return 1
    path = options.output or tuning.TABLES / f"{device_name(target)}.json"
    until = time.monotonic() + 60 * options.minutes
    for task in _tasks(options, target):
        if task.refusal is not None:
            print(f"{task.kind} {task.facts}: {task.refusal}")
            continue
        if time.monotonic() > until:
            print(f"{options.minutes:g} minutes are over; the remaining problems are not timed")
            break
        best = task.fastest(target)
        if best is not None:
            # The table is written after each problem, so that an interrupted run keeps its results.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_entries(path, merged(read_entries(path), options.backend, task, best))
    print(f"wrote {path}" if path.exists() else "no candidate could be timed")
    return 0 if path.exists() else 1


def _tasks(options: argparse.Namespace, target: KernelTarget) -> Iterator[Task]:
    if options.kernel == "attention":
        return attention.tasks(options.backend, target, fp8=options.fp8, tiny=options.interpret_tiny)
    module = experts if options.kernel == "experts" else products
    return module.tasks(options.backend, target, tiny=options.interpret_tiny)


def merged(entries: list[dict[str, Any]], backend: str, task: Task, blocks: dict[str, int]) -> list[dict[str, Any]]:
    """Return the entries with this one added, in place of an older one of the same key."""
    key = {"backend": backend, "kind": task.kind, "problem": task.facts}
    others = [entry for entry in entries if {name: entry[name] for name in key} != key]
    return [*others, {**key, "blocks": blocks}]


if __name__ == "__main__":
    sys.exit(main())
