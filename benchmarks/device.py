#!/usr/bin/env python3
"""Measures an accelerator and jaxserve on it, in one command with a time limit.

    python benchmarks/device.py                     # at most 9 minutes: the most telling sections
    python benchmarks/device.py --resume            # in a further call: the sections that are left
    python benchmarks/device.py --wheels DIR        # wheels of packages that are missing on the machine
    python benchmarks/device.py --interpret-tiny    # a dry run of every section on a CPU, without measuring
    python benchmarks/device.py --compile-for nvidia-h100    # the engines' programs, for a device that isn't here

Each section is a process with a time limit. A section that fails, hangs or runs out of memory is reported and keeps its
rows, and the others continue. After every section all rows so far are in benchmarks/results/<device>/device.json, each
with its prediction if there is one; sections.log beside it has all that sections wrote to stderr, and the stacks of one
that hung. At the end the script prints one table, with a ratio for each figure that has a reference. Compiled programs
and tuned products are kept for further calls.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

RATES = "machine.rates"
# The sections (module.function under device_sections), the most telling first, and the seconds that each needs. Time
# beyond their sum is divided alike; a section for which too little is left is left to a further call.
SECTIONS = {
    RATES: 25,
    "kernels.correctness": 80,
    "engine.llama_3_1_8b": 150,
    "engine.llama_3_1_8b_fp8": 165,
    "engine.gpt_oss_20b": 165,
    "kernels.decode": 70,
    "kernels.prefill": 40,
    "options.steps": 180,
    "experts.correctness": 40,
    "quantized.correctness": 60,
    "engine.llama_3_1_8b_int4": 150,
    "programs.dispatch": 60,
    "quantized.products": 60,
    "experts.products": 60,
    "engine.llama_3_2_1b": 120,
    "kernels.every_case": 120,
    "engine.gemma_3_4b": 180,
    "engine.qwen3_0_6b": 120,
    "peer.transformers": 120,
}
# A section is started only if this share of its seconds is left.
_ENOUGH = 0.8
# The share of its time that a section may plan with, and the seconds in which one that hangs writes where.
_OWN_SHARE, _STACKS = 0.93, 2.0


def main() -> int:
    """Run the command; return 1 if a section failed, or a program doesn't build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run (default 9)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="run only these sections")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of what is missing here")
    parser.add_argument("--resume", type=Path, nargs="?", const=Path(), metavar="DIR",
                        help="run the sections that are missing in the JSON of this device and these sources under DIR "
                             "(default: --results), and keep its rows")  # fmt: skip
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for JSON files")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "jaxserve-device-programs",
                        help="folder for compiled programs and tuned products (default %(default)s)")  # fmt: skip
    parser.add_argument("--interpret-tiny", action="store_true", help="a dry run on a CPU: kernels are interpreted")
    parser.add_argument("--compile-for", metavar="TARGET", help="compile programs of the engines' sections, as "
                        "`jaxserve compile --target` does, and run nothing")  # fmt: skip
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section is not None:
        return run_section(arguments)
    if arguments.compile_for is not None:
        from device_sections import engine

        return 0 if engine.compile_for(arguments.compile_for) else 1
    return run_all(arguments)


def run_section(arguments: argparse.Namespace) -> int:
    """Run a section, or a part of it, in its own process; it appends its rows to a file as it finds them."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    from device_sections.run import SectionRun

    module, function = arguments.section.split(".")
    end, tiny = time.monotonic() + arguments.seconds, arguments.interpret_tiny
    run = SectionRun(arguments.section, arguments.rows, arguments.cache, end, tiny, arguments.part)
    getattr(importlib.import_module(f"device_sections.{module}"), function)(run)
    return 0


def run_all(arguments: argparse.Namespace) -> int:
    """Run the sections one after the other, write the JSON after each, and print the table."""
    end = time.monotonic() + 60 * arguments.minutes
    environment = dict(os.environ)
    if arguments.interpret_tiny:
        environment["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.wheels is not None:
            environment["PYTHONPATH"] = install(arguments.wheels, Path(scratch) / "packages")
        rows, log = Path(scratch) / "rows.jsonl", Path(scratch) / "sections.log"
        rows.touch()
        log.touch()
        cache = Path(scratch) / "programs" if arguments.interpret_tiny else arguments.cache
        command = [sys.executable, __file__, "--rows", str(rows), "--cache", str(cache)]
        command += ["--interpret-tiny"] if arguments.interpret_tiny else []
        found: dict[str, Any] = {"device": "unknown", "sources": sources(), "done": [], "faults": []}
        # The rates are always measured: they name the device, and other sections compare with them.
        waiting = [RATES, *(name for name in arguments.only if name != RATES)]
        while waiting:
            name = waiting.pop(0)
            left = end - time.monotonic()
            seconds = left if arguments.interpret_tiny else time_limit(name, waiting, left)
            if seconds is None:
                print(f"{name}: left to another call with --resume, only {left:.0f} s remain", file=sys.stderr)
                continue
            fault = one_section(name, command, seconds, log, environment)
            if fault is None:
                found["done"].append(name)
            else:
                print(f"{name}: {fault}", file=sys.stderr, flush=True)
                found["faults"].append({"section": name, "fault": fault})
            found["rows"] = read_rows(rows)
            if name == RATES:
                found["device"] = next((row["note"] for row in found["rows"] if row["name"] == "device"), "unknown")
                path = result_path(arguments.results, found["device"])
                if arguments.resume is not None:
                    earlier = arguments.results if arguments.resume == Path() else arguments.resume
                    waiting = resume(result_path(earlier, found["device"]), found, rows, waiting)
            if not arguments.interpret_tiny:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1))
                shutil.copy(log, path.with_name(log.name))
    print_table(found["device"], found["rows"], found["faults"], arguments.interpret_tiny)
    return 1 if found["faults"] else 0


def time_limit(name: str, waiting: list[str], left: float) -> float | None:
    """Return the time limit of the next section; None if the `left` seconds are too few to start it."""
    needed = SECTIONS[name]
    seconds = min(left, needed * max(1.0, left / sum(SECTIONS[one] for one in (name, *waiting))))
    return seconds if seconds >= needed * _ENOUGH else None


def resume(path: Path, found: dict[str, Any], rows: Path, waiting: list[str]) -> list[str]:
    """Add the rows of an earlier run's finished sections to `found` and to the file of rows; return what is left."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    if earlier.get("sources") != found["sources"]:
        print(f"{path}: {'other sources' if earlier else 'nothing'} to resume from", file=sys.stderr)
        return waiting
    kept = [name for name in earlier["done"] if name != RATES]
    found["done"] += kept
    with rows.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in earlier["rows"] if row["section"] in kept)
    found["rows"] = read_rows(rows)
    return [name for name in waiting if name not in kept]


def read_rows(rows: Path) -> list[dict[str, Any]]:
    """Return all rows so far."""
    return [json.loads(line) for line in rows.read_text().splitlines()]


def result_path(folder: Path, device: str) -> Path:
    """Return the path of a device's JSON."""
    return folder / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") / "device.json"


def sources() -> str:
    """Return a hash of all that the figures depend on; the machine may have no git."""
    digest = hashlib.sha256()
    for folder in ("jaxserve", "pallas_kernels", "benchmarks/device_sections"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def one_section(name: str, command: list[str], seconds: float, log: Path, environment: dict[str, str]) -> str | None:
    """Run a section, whose stderr is added to `log`; return why it failed, or None.

    It limits its own time; if it hangs, it is asked for its stacks and killed, with its parts.
    """
    if seconds < 1:
        return "no time was left"
    print(f"== {name}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
    with log.open("a+") as errors:
        print(f"== {name}, at most {seconds:.0f} s", file=errors, flush=True)
        start = errors.tell()
        argv = [*command, "--section", name, "--seconds", str(_OWN_SHARE * seconds)]
        process = subprocess.Popen(argv, env=environment, stderr=errors, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(_STACKS)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"ended after {seconds:.0f} s"
        errors.seek(start)
        lines = [line.strip() for line in errors if line.strip()]
    if code == 0:
        return None
    return f"exit code {code}: {lines[-1] if lines else 'it printed nothing'}"


def install(wheels: Path, folder: Path) -> str:
    """Install a folder of wheels, and return the PYTHONPATH to import them from."""
    options = ["--no-index", "--no-deps", "--no-compile", "--target", str(folder), "-q"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels.glob("*.whl"))], check=True)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def print_table(device: str, rows: list[dict[str, Any]], faults: list[dict[str, str]], tiny: bool) -> None:
    """Print all rows; `ratio` is the value over the reference in column "of", `goal` the ratio to reach.

    The prediction has the unit of the value.
    """
    from jaxserve.cli.common.table import format_table

    print(f"\n{device}" + (": A DRY RUN, NO FIGURE WAS MEASURED" if tiny else ""))
    lines = []
    for row in rows:
        ratio = f"{row['value'] / row['reference']:.2f}" if row["reference"] else ""
        cells = (
            _number(row["value"]),
            row["unit"],
            _number(row["reference"]),
            ratio,
            _number(row["goal"]),
            _number(row["predicted"]),
            row["note"],
        )
        lines.append((row["section"], row["name"], *cells))
    header = ("section", "what", "value", "unit", "of", "ratio", "goal", "predicted", "note")
    print(format_table(header, lines, left=(0, 1, 3, 8)))
    for fault in faults:
        print(f"{fault['section']}  FAILED: {fault['fault']}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
