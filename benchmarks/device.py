#!/usr/bin/env python3
"""Measures an accelerator and jaxserve on it, in one command with a time limit.

    python benchmarks/device.py --minutes 30
    python benchmarks/device.py --wheels DIR        # wheels of packages that are missing on the machine
    python benchmarks/device.py --interpret-tiny    # a dry run of every section on a CPU, without measuring

Each section is a process with a share of the time. A section that fails, hangs or runs out of memory is reported and
keeps its rows, and the others continue. Rows go to benchmarks/results/<device>/device.json; at the end the script
prints one table, with a ratio for each figure that has a reference.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

# The sections (module.function under device_sections) and their shares of the time.
SECTIONS = {
    "machine.rates": 1,
    "kernels.correctness": 4,
    "kernels.decode": 4,
    "kernels.prefill": 3,
    "programs.dispatch": 2,
    "engine.qwen3_0_6b": 3,
    "engine.llama_3_2_1b": 3,
    "engine.llama_3_1_8b": 8,
    "peer.transformers": 3,
}
NEEDED = {
    "msgspec": "msgspec", "zmq": "pyzmq", "jaxtyping": "jaxtyping", "flax": "flax", "psutil": "psutil", "tqdm": "tqdm",
    "yaml": "pyyaml", "safetensors": "safetensors", "gguf": "gguf", "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
}  # fmt: skip


def main() -> int:
    """Run the command; return 1 if a section failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of the whole run (default 30)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="run only these sections")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of packages missing here")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for JSON files")
    parser.add_argument("--interpret-tiny", action="store_true", help="a dry run on a CPU: kernels are interpreted")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.section is not None:
        return run_section(arguments.section, arguments.rows, arguments.seconds, arguments.interpret_tiny)
    return run_all(arguments)


def run_section(name: str, rows: Path, seconds: float, tiny: bool) -> int:
    """Run a section in its own process; it appends its rows to a file as it finds them."""
    from device_sections.run import SectionRun

    module, function = name.split(".")
    run = SectionRun(rows, time.monotonic() + seconds, tiny)
    getattr(importlib.import_module(f"device_sections.{module}"), function)(run)
    return 0


def run_all(arguments: argparse.Namespace) -> int:
    """Run the sections one after the other, then write the JSON and print the table."""
    end = time.monotonic() + 60 * arguments.minutes
    environment = dict(os.environ)
    if arguments.interpret_tiny:
        environment["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.wheels is not None:
            environment["PYTHONPATH"] = install(arguments.wheels, Path(scratch) / "packages")
        rows = Path(scratch) / "rows.jsonl"
        rows.touch()
        faults = []
        waiting = list(arguments.only)
        while waiting:
            name = waiting.pop(0)
            share = SECTIONS[name] / (SECTIONS[name] + sum(SECTIONS[other] for other in waiting))
            fault = one_section(name, rows, (end - time.monotonic()) * share, arguments.interpret_tiny, environment)
            if fault is not None:
                print(f"{name}: {fault}", file=sys.stderr, flush=True)
                faults.append({"section": name, "fault": fault})
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    device = next((row["note"] for row in found if row["name"] == "device"), "unknown")
    folder = arguments.results / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    if not arguments.interpret_tiny:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "device.json").write_text(json.dumps({"device": device, "rows": found, "faults": faults}, indent=1))
    print_table(device, found, faults, arguments.interpret_tiny)
    return 1 if faults else 0


def one_section(name: str, rows: Path, seconds: float, tiny: bool, environment: dict[str, str]) -> str | None:
    """Run a section; return why it failed, or None. It limits its own time; if it hangs, it is killed a little
    later."""
    if seconds < 1:
        return "no time was left"
    print(f"== {name}, at most {seconds:.0f} s", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--section", name, "--rows", str(rows), "--seconds", str(seconds * 0.9)]
    process = subprocess.Popen(
        [*command, *(["--interpret-tiny"] if tiny else [])], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"ended after {seconds:.0f} s"
    if process.returncode == 0:
        return None
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    return f"exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"


def install(wheels: Path, folder: Path) -> str:
    """Install the missing packages from a folder of wheels, and return the PYTHONPATH to import them from."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        options = ["--no-index", "--find-links", str(wheels), "--target", str(folder), "--no-deps", "-q"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *missing], check=True)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def print_table(device: str, rows: list[dict[str, Any]], faults: list[dict[str, str]], tiny: bool) -> None:
    """Print all rows; `ratio` is the value over the reference in column "of", `goal` the ratio to reach."""
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
            row["note"],
        )
        lines.append((row["section"], row["name"], *cells))
    header = ("section", "what", "value", "unit", "of", "ratio", "goal", "note")
    print(format_table(header, lines, left=(0, 1, 3, 7)))
    for fault in faults:
        print(f"{fault['section']}  FAILED: {fault['fault']}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
