"""`jaxserve compile`: compiles the programs of a deployment ahead of time.

With --target for a device that isn't here, on any machine: it says how long each takes, the memory it needs, what it
exchanges between devices and which kernels are in it; then what each kernel takes of a core: registers of a thread, its
stack (where spilled registers lie) and shared memory of a block, on a TPU VMEM. It fails where a program doesn't build
or would copy the KV pool.
--model may be a folder without weights, or a config.json. With --output for the device that is here: the programs are
kept in a folder, and `jaxserve serve --programs DIR` starts with them and compiles nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import HelpFormatter, Parser
from jaxserve.cli.common.table import span, table
from jaxserve.config.data_parallel import when_serving
from jaxserve.config.threads import threads_of_each
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.config.load import Loaded
    from jaxserve.runtime.programs.inspection import KernelReport, ProgramReport

_HEADER = ("program", "seconds", "temp MiB", "aliased MiB", "collectives", "kernels")
_KERNEL_HEADER = ("kernel", "programs")
_GPU_HEADER = ("registers", "stack bytes", "shared KiB", "threads")
_TPU_HEADER = ("VMEM KiB",)


def parser() -> Parser:
    """The flags of `jaxserve compile`."""
    parser = Parser(prog="jaxserve compile", description=__doc__, formatter_class=HelpFormatter)
    add_target(parser)
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="keep programs for the device that is here in a folder"
    )
    parser.add_argument("--only", metavar="PATTERN", default="*", help="programs by name, such as 'decode-64-*'")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    flags.add_model(parser)
    flags.add_settings(parser)
    return parser


def add_target(parser: Parser) -> None:
    """The device that isn't here."""
    parser.add_argument("--target", metavar="NAME", help="a device that isn't here, such as nvidia-h200 or tpu-v6e")


def main(argv: list[str]) -> int:
    """Run it; returns 1 where a program didn't build or copies the KV pool."""
    arguments = parser().parse(argv)
    loaded = flags.loaded(arguments)
    flags.arguments(loaded)
    if arguments.output is None:
        return _for_target(loaded, required_target(arguments.target), arguments.only, arguments.json)
    if arguments.target is not None:
        raise ConfigError("--target and --output: programs for a device that isn't here can't be kept, only compiled")
    if arguments.only != "*":
        raise ConfigError("--only and --output: a folder of programs is whole or of no use")
    return _into_folder(loaded, arguments.output, arguments.json)


def required_target(name: str | None) -> str:
    """Raises `ConfigError` naming those there are where none was given."""
    if name is None:
        from jaxserve.runtime.devices.target import target_names

        raise ConfigError(f"say for which device: --target {{{','.join(target_names())}}}")
    return name


def _for_target(loaded: Loaded, name: str, only: str, as_json: bool) -> int:
    # XLA's notes on its own estimates would bury the table.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jaxserve.runtime.sizing import aot

    deployment = aot.deploy_on_target(when_serving(loaded.engine), name)
    keys = aot.chosen_keys(deployment, only)
    builder = aot.builder_for_target(deployment, name)
    print(f"{loaded.engine.model} on {deployment.num_devices} x {name}: {len(keys)} programs, "
          f"attention: {deployment.backend.name} ({deployment.backend.reason})", file=sys.stderr)  # fmt: skip
    reports = watched(aot.compile_programs(builder, keys), [str(key) for key in keys])
    show(reports, as_json, {"target": name, "devices": deployment.num_devices, "model": loaded.engine.model})
    return 1 if any(report.fault for report in reports) else 0


def _into_folder(loaded: Loaded, folder: Path, as_json: bool) -> int:
    config = when_serving(loaded.engine)
    if config.dp_mode == "replicas":
        # On a CPU a program is made for the threads that it will have.
        os.environ |= threads_of_each(os.environ, config.dp_size)
    from jaxserve.runtime.programs import bundle
    from jaxserve.runtime.programs.own_files import ForeignFileError, check_own, make_own
    from jaxserve.runtime.sizing import aot

    try:
        make_own(folder)
        check_own(folder)
    except (OSError, ForeignFileError) as error:
        raise ConfigError(f"--output {folder}: {error}") from None
    deployment, builder = aot.deploy_on_device(config)
    keys = aot.chosen_keys(deployment)
    (folder / bundle.MANIFEST).unlink(missing_ok=True)
    reports = watched(aot.compile_programs(builder, keys, folder), [str(key) for key in keys])
    show(reports, as_json, {"output": str(folder), "device": builder.facts()["device"], "model": loaded.engine.model})
    if any(report.fault for report in reports):
        return 1
    bundle.write_manifest(folder, loaded.engine, builder, keys)
    print(f"jaxserve serve --programs {folder} starts with them", file=sys.stderr)
    return 0


def watched(reports: Iterable[ProgramReport], names: Sequence[str]) -> list[ProgramReport]:
    """All of them in the order of their names, under a progress bar; a fault is told as it is found."""
    done: list[ProgramReport] = []
    with tqdm(total=len(names), desc="Compiling programs", unit="program", file=sys.stderr, dynamic_ncols=True) as bar:
        for report in reports:
            done.append(report)
            bar.update()
            bar.set_postfix_str(report.name)
            if report.fault:
                bar.write(f"{report.name}: {report.fault}", file=sys.stderr)
    return sorted(done, key=lambda report: names.index(report.name))


def show(reports: Sequence[ProgramReport], as_json: bool, about: Mapping[str, object]) -> None:
    """The tables, or the same as JSON; faults last."""
    if unread := next((report for report in reports if report.unread), None):
        print(f"what kernels take of a core can't be read out of {unread.name}: {unread.unread}", file=sys.stderr)
    if as_json:
        print(json.dumps({**about, "programs": [dataclasses.asdict(report) for report in reports]}, indent=2))
        return
    print(table(_HEADER, [_row(report) for report in reports], left=(0, 4, 5)))
    if kernels := _kernel_table(reports):
        print(f"\n{kernels}")
    faults = [report for report in reports if report.fault]
    for report in faults:
        print(f"\n{report.name} can't be used: {report.fault}")
    total = sum(report.seconds for report in reports)
    print(f"\n{len(reports) - len(faults)} of {len(reports)} programs are good, {total:.0f} s of compiling in all")


def _row(report: ProgramReport) -> tuple[str, ...]:
    if report.fault and not report.alias_bytes:
        return (report.name, f"{report.seconds:.1f}", "-", "-", "-", "not built")
    return (
        report.name,
        f"{report.seconds:.1f}",
        f"{report.temp_bytes / 2**20:.1f}",
        f"{report.alias_bytes / 2**20:.1f}",
        _counted(report.collectives),
        _counted(report.kernels),
    )


def _kernel_table(reports: Sequence[ProgramReport]) -> str:
    """What each kernel of ours takes, over all programs; nothing where none is in them."""
    kernels: dict[str, list[KernelReport]] = {}
    programs: collections.Counter[str] = collections.Counter()
    for report in reports:
        programs.update({one.kernel for one in report.own_kernels})
        for one in report.own_kernels:
            kernels.setdefault(one.kernel, []).append(one)
    if not kernels:
        return ""
    on_tpu = all(name.endswith("mosaic tpu)") for name in kernels)
    rows = [
        (name, str(programs[name]), *(_vmem(found) if on_tpu else _of_gpu(found))) for name, found in kernels.items()
    ]
    return table(_KERNEL_HEADER + (_TPU_HEADER if on_tpu else _GPU_HEADER), rows)


def _of_gpu(found: Sequence[KernelReport]) -> tuple[str, ...]:
    return (
        span(one.registers for one in found),
        span(one.stack_bytes for one in found),
        span((_kib(one.shared_bytes) for one in found), "{:.1f}"),
        span(one.threads for one in found),
    )


def _vmem(found: Sequence[KernelReport]) -> tuple[str, ...]:
    return (span((_kib(one.vmem_bytes) for one in found), "{:.0f}"),)


def _kib(size: int | None) -> float | None:
    return None if size is None else size / 1024


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "-"
