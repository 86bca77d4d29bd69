"""`jaxserve compile`: compiles the programs of a deployment ahead of time.

With --target it compiles for a device that isn't here, on any machine. It shows for each program the compile time, the
memory, the collectives and the kernels; then for each kernel the registers per thread, the stack (where spilled
registers are) and the shared memory per block, or on a TPU the VMEM; then what a step of each program costs: launches,
command buffers, waits of the host, bytes, and the predicted time beside the time of the roofline. --explain adds the
kernels that move most bytes. It fails if a program doesn't build or would copy the KV pool. --model may be a
folder without weights, or a config.json. With --pp-size, programs have names such as stage-0/decode-8-full, and those
that send from a stage to the next one transfer-0/send-8.
With --output it keeps the programs in a folder; `jaxserve serve --programs DIR` starts with them and compiles nothing.
They are for the device of this machine, or with --target for an NVIDIA GPU that isn't here. No GPU has loaded programs
that were compiled on another machine yet; if one can't, the server compiles its own.
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
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.table import format_range, format_table
from jaxserve.config.data_parallel import resolve_dp_mode
from jaxserve.config.threads import divide_threads
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from jaxserve.config.load import LoadedConfig
    from jaxserve.runtime.programs.cost import LaunchCost
    from jaxserve.runtime.programs.inspection import KernelReport, ProgramReport
    from jaxserve.runtime.sizing.prediction import Prediction

_HEADER = ("program", "seconds", "temp MiB", "aliased MiB", "collectives", "kernels")
_KERNEL_HEADER = ("kernel", "programs")
_GPU_HEADER = ("registers", "stack bytes", "shared KiB", "threads")
_TPU_HEADER = ("VMEM KiB",)
_COST_HEADER = (
    "program", "launches", "command buffers", "host waits", "read MiB", "written MiB", "roofline ms", "predicted ms",
    "ratio",
)  # fmt: skip
_COSTLIEST_HEADER = ("kernel", "calls", "read MiB", "written MiB", "GFLOP")


def parser() -> Parser:
    """Return the parser of `jaxserve compile`."""
    parser = Parser(prog="jaxserve compile", description=__doc__)
    add_target(parser)
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder to keep the programs in")
    parser.add_argument(
        "--only", metavar="PATTERN", default="*", help="compile only these programs, e.g. 'decode-64-*'"
    )
    parser.add_argument("--explain", action="store_true", help="show the ten costliest kernels of each program")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    flags.add_model(parser)
    flags.add_settings(parser)
    return parser


def add_target(parser: Parser) -> None:
    """Add the flag for a device that isn't here."""
    parser.add_argument("--target", metavar="NAME", help="a device that isn't here, such as nvidia-h200 or tpu-v6e")


def main(argv: list[str]) -> int:
    """Run the command; return 1 if a program doesn't build or copies the KV pool."""
    arguments = parser().parse(argv)
    loaded = flags.config_from_arguments(arguments)
    flags.llm_arguments(loaded)
    if arguments.output is None:
        return _for_target(loaded, required_target(arguments.target), arguments)
    if arguments.only != "*":
        raise ConfigError("--only and --output: a folder of programs must hold all of them; leave out --only")
    return _into_folder(loaded, arguments.output, arguments.target, arguments.json)


def required_target(name: str | None) -> str:
    """Return `name`. Raises `ConfigError` that lists all targets if it is None."""
    if name is None:
        from jaxserve.runtime.devices.target import target_names

        raise ConfigError(f"name the device: --target {{{','.join(target_names())}}}")
    return name


def _for_target(loaded: LoadedConfig, name: str, arguments: Namespace) -> int:
    # Hide XLA's log lines about its own estimates.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jaxserve.runtime.sizing import aot

    deployment = aot.deploy_on_target(resolve_dp_mode(loaded.engine), name)
    every = aot.program_parts(deployment, aot.meshes_for_target(deployment, name))
    parts = aot.matching_programs(every, arguments.only)
    names, left_out = aot.names_of(parts), aot.left_out_transfers(deployment, every)
    print(f"{loaded.engine.model} on {deployment.num_devices} x {name}: {len(names)} programs, "
          f"attention: {deployment.backend.name} ({deployment.backend.reason})", file=sys.stderr)  # fmt: skip
    if left_out:
        print(f"not compiled: {', '.join(left_out)}: target {name} has no topology with the devices of both stages",
              file=sys.stderr)  # fmt: skip
    reports = collect_reports(aot.compile_programs(parts), names)
    predictions = aot.predict_steps(deployment, name, parts, reports)
    about = {"target": name, "devices": deployment.num_devices, "model": loaded.engine.model, "not_compiled": left_out}
    print_reports(reports, arguments.json, about, predictions, explain=arguments.explain)
    return 1 if any(report.fault for report in reports) else 0


def _into_folder(loaded: LoadedConfig, folder: Path, target: str | None, as_json: bool) -> int:
    config = resolve_dp_mode(loaded.engine)
    if config.dp_mode == "replicas":
        # A CPU program is compiled for its number of threads: use that of one replica.
        os.environ |= divide_threads(os.environ, config.dp_size)
    from jaxserve.runtime.programs import bundle
    from jaxserve.runtime.programs.own_files import UntrustedFileError, check_owner, make_private_folder
    from jaxserve.runtime.sizing import aot

    try:
        make_private_folder(folder)
        check_owner(folder)
    except (OSError, UntrustedFileError) as error:
        raise ConfigError(f"--output {folder}: {error}") from None
    if target is None:
        deployment, meshes = aot.deploy_on_device(config)
    else:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        deployment, meshes = aot.deploy_for_bundle(config, target)
    parts = aot.program_parts(deployment, meshes)
    (folder / bundle.MANIFEST).unlink(missing_ok=True)
    reports = collect_reports(aot.compile_programs(parts, folder), aot.names_of(parts))
    device = parts[0].builder.facts()["device"]
    print_reports(reports, as_json, {"output": str(folder), "device": device, "model": loaded.engine.model})
    if any(report.fault for report in reports):
        return 1
    bundle.write_manifest(folder, loaded.engine, parts, target or "")
    print(f"jaxserve serve --programs {folder} starts with them", file=sys.stderr)
    return 0


def collect_reports(reports: Iterable[ProgramReport], names: Sequence[str]) -> list[ProgramReport]:
    """Return all reports in the order of `names`; show progress, and each fault as soon as it is found."""
    done: list[ProgramReport] = []
    with tqdm(total=len(names), desc="Compiling programs", unit="program", file=sys.stderr, dynamic_ncols=True) as bar:
        for report in reports:
            done.append(report)
            bar.update()
            bar.set_postfix_str(report.name)
            if report.fault:
                bar.write(f"{report.name}: {report.fault}", file=sys.stderr)
    return sorted(done, key=lambda report: names.index(report.name))


def print_reports(
    reports: Sequence[ProgramReport],
    as_json: bool,
    about: Mapping[str, object],
    predictions: Mapping[str, Prediction] | None = None,
    *,
    explain: bool = False,
) -> None:
    """Print the tables, or the same as JSON; faults come last."""
    predictions = predictions or {}
    if unread := next((report for report in reports if report.unread), None):
        print(f"the resources of kernels can't be read from {unread.name}: {unread.unread}", file=sys.stderr)
    if as_json:
        print(json.dumps({**about, "programs": [_json(one, predictions.get(one.name)) for one in reports]}, indent=2))
        return
    print(format_table(_HEADER, [_row(report) for report in reports], left=(0, 4, 5)))
    if kernels := _kernel_table(reports):
        print(f"\n{kernels}")
    if costs := [_cost_row(report, predictions.get(report.name)) for report in reports if report.cost]:
        print(f"\n{format_table(_COST_HEADER, costs)}")
    for report in reports if explain else ():
        if report.cost:
            rows = [_costliest_row(one) for one in report.cost.costliest(10)]
            print(f"\n{report.name}\n{format_table(_COSTLIEST_HEADER, rows)}")
    faults = [report for report in reports if report.fault]
    for report in faults:
        print(f"\n{report.name} can't be used: {report.fault}")
    total = sum(report.seconds for report in reports)
    print(f"\n{len(reports) - len(faults)} of {len(reports)} programs are good, {total:.0f} s of compiling in total")


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


def _json(report: ProgramReport, prediction: Prediction | None) -> dict[str, object]:
    written = {**dataclasses.asdict(report), "cost": report.cost.as_json() if report.cost else None}
    return {**written, "prediction": dataclasses.asdict(prediction) if prediction else None}


def _cost_row(report: ProgramReport, prediction: Prediction | None) -> tuple[str, ...]:
    assert report.cost is not None
    cost, grouping = report.cost, report.cost.grouping
    counts = ("-", "-") if grouping is None else (str(grouping.command_buffers), str(grouping.host_waits))
    times = ("-",) * 3
    if prediction is not None:
        limit, seconds = prediction.limit, prediction.seconds
        times = (f"{limit * 1e3:.2f}", f"{seconds * 1e3:.2f}", f"{seconds / limit:.2f}")
    return (report.name, str(cost.launches), *counts, *map(_mib, (cost.read_bytes, cost.written_bytes)), *times)


def _costliest_row(one: LaunchCost) -> tuple[str, ...]:
    return (one.kernel, str(one.calls), _mib(one.read_bytes), _mib(one.written_bytes), f"{one.flops / 1e9:.1f}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _kernel_table(reports: Sequence[ProgramReport]) -> str:
    """Return the resources of each of our kernels over all programs; "" if there are none."""
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
    return format_table(_KERNEL_HEADER + (_TPU_HEADER if on_tpu else _GPU_HEADER), rows)


def _of_gpu(found: Sequence[KernelReport]) -> tuple[str, ...]:
    return (
        format_range(one.registers for one in found),
        format_range(one.stack_bytes for one in found),
        format_range((_kib(one.shared_bytes) for one in found), "{:.1f}"),
        format_range(one.threads for one in found),
    )


def _vmem(found: Sequence[KernelReport]) -> tuple[str, ...]:
    return (format_range((_kib(one.vmem_bytes) for one in found), "{:.0f}"),)


def _kib(size: int | None) -> float | None:
    return None if size is None else size / 1024


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "-"
