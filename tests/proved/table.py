"""The table of cases that were proved: `cases.json`. A case whose inputs are all as when it passed isn't run again.

Two kinds of cases have such inputs, whatever the machine: kernels that are interpreted (marker `interpreted`) and
programs that are compiled for devices that aren't here (`aot`). Their inputs are the sources that the file of tests
imports, directly or not, and the versions of the packages that compile them. If sources differ, a compiled program can
still be the same: then its lowered text decides (`plugin.py`).

The run that passes writes the table; each entry has a seal, so that one that was changed by hand counts for nothing.
This module needs nothing but Python: `python -m tests.proved.table FOLDER` says whether all cases of a folder are
proved for the packages that pip would install, before it has installed any.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATH = Path(__file__).with_name("cases.json")
PACKAGES = re.compile(r"(jax(lib|-cuda.*)?|flax|numpy|ml-dtypes|libtpu|nvidia-(cuda-nvcc|cuda-nvrtc|nvvm|nvjitlink))$")
"""What makes a case's result. Others, pytest among them, only run it."""

OURS = ("jaxserve", "pallas_kernels", "tests")
READERS = re.compile(r"tests/|jaxserve/(cli|runtime/(programs|sizing|devices))/|pallas_kernels/gpu_code/")
"""Sources that size programs and read what the compiler made of them. What the others make is in a program's text."""

RUNNERS = re.compile(r"tests/(conftest|selection|budgets|proved/.*)\.")
"""Sources that choose cases, count and order them: no case depends on them."""

Entry = dict[str, Any]
Case = dict[str, Any]


def digest(value: Any) -> str:
    """Return a hash of JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def sources(file: str) -> tuple[str, str]:
    """Return a hash of all sources of a file of tests, and one of those that check a program."""
    hashes = {str(path.relative_to(ROOT)): _content(path) for path in _closure(ROOT / file)}
    return digest(hashes), digest({name: one for name, one in hashes.items() if READERS.match(name)})


def environment(installed: Mapping[str, str]) -> dict[str, str]:
    """Return what a result depends on besides sources, given the versions of installed packages."""
    versions = {name: version for name, version in sorted(installed.items()) if PACKAGES.match(name)}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "machine": platform.machine(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), **versions}


def installed() -> dict[str, str]:
    """Return the versions of this environment's packages."""
    return {_canonical(one.name): one.version for one in importlib.metadata.distributions()}


def would_be_installed(extras: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that pip would install for the project and its extras, as it says.

    Raises `CalledProcessError` if it can't, as without an index.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    wanted = [one for one in wanted if PACKAGES.match(re.split(r"[\[<>=]", one)[0])]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-qqq"]
    report = subprocess.run(
        [*pip, "--dry-run", "--ignore-installed", "--report", "-", *wanted], check=True, capture_output=True, text=True
    )
    found = [one["metadata"] for one in json.loads(report.stdout)["install"]]
    return {_canonical(one["name"]): one["version"] for one in found}


class Table:
    """What has been proved, by file of tests and case, in one environment."""

    def __init__(self, here: Mapping[str, str], path: Path = PATH) -> None:
        self._here, self._path = dict(here), path
        read = json.loads(path.read_text()) if path.exists() else {}
        self._environments: dict[str, dict[str, str]] = read.get("environments", {})
        self._files: dict[str, Entry] = {name: one for name, one in read.get("files", {}).items() if _is_genuine(one)}
        self.sources = functools.cache(sources)

    def cases(self, file: str) -> dict[str, Case]:
        """Return the cases of a file that are proved for its sources as they are."""
        return self._cases(file, "sources", self.sources(file)[0])

    def programs(self, file: str) -> dict[str, Case]:
        """Return the cases of a file that are proved if their programs are the same, as those are checked the same."""
        return self._cases(file, "checks", self.sources(file)[1])

    def add(self, file: str, tested: str, passed: Mapping[str, Case]) -> None:
        """Add cases that passed with sources of this hash; none, if the sources have changed meanwhile."""
        now = sources(file)
        if now[0] != tested:
            return
        environment = digest(self._here)
        entry: Entry = {"environment": environment, "sources": now[0], "checks": now[1]}
        entry["cases"] = self.cases(file) | dict(passed)
        self._environments[environment] = self._here
        self._files[file] = {**entry, "seal": digest(entry)}

    def write(self) -> None:
        """Write it, without files that are gone."""
        files = {name: entry for name, entry in sorted(self._files.items()) if (ROOT / name).exists()}
        used = {entry["environment"] for entry in files.values()}
        environments = {name: one for name, one in sorted(self._environments.items()) if name in used}
        text = json.dumps({"environments": environments, "files": files}, indent=1)
        # A case is one line.
        text = re.sub(
            r"\{\s+\"programs\".*?\}", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text, flags=re.DOTALL
        )
        self._path.write_text(text + "\n")

    def _cases(self, file: str, name: str, expected: str) -> dict[str, Case]:
        entry = self._files.get(file)
        if entry is None or entry["environment"] != digest(self._here) or entry[name] != expected:
            return {}
        return dict(entry["cases"])


def _is_genuine(entry: Entry) -> bool:
    return entry.get("seal") == digest({name: one for name, one in entry.items() if name != "seal"})


def _closure(test: Path) -> set[Path]:
    """Return a file of tests and all of our files that its imports lead to, with the data beside them."""
    found: set[Path] = set()
    left = [test, *(folder / "conftest.py" for folder in test.parents if ROOT in folder.parents)]
    while left:
        path = left.pop()
        if path not in found and path.exists() and not RUNNERS.match(str(path.relative_to(ROOT))):
            found.add(path)
            left += _leads_to(path)
    return found


@functools.cache
def _content(path: Path) -> str:
    """Return a hash of a file: of Python, of the code without comments and docstrings, which change no result."""
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        may_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if may_have_one and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@functools.cache
def _leads_to(path: Path) -> frozenset[Path]:
    """Return the files that one file imports or reads.

    A folder of kernels goes together, as backends are imported by name; data lies below the modules that read it.
    """
    folder = path.parent
    if path.suffix != ".py":
        return frozenset()
    found = {parent / "__init__.py" for parent in path.parents if ROOT in parent.parents}
    if folder != ROOT / "tests":
        found |= {one for one in folder.rglob("*") if one.suffix in (".json", ".yaml", ".safetensors", ".bin")}
    parts = path.relative_to(ROOT).parts
    if parts[0] == "pallas_kernels" and len(parts) > 2:
        found |= set((ROOT / parts[0] / parts[1]).rglob("*.py"))
    text = path.read_text()
    if "fixtures" in text:
        found |= {one for one in (ROOT / "tests" / "fixtures").rglob("*") if one.is_file()}
    for name in _imported(ast.parse(text)):
        if name.partition(".")[0] in OURS:
            place = ROOT / name.replace(".", "/")
            found |= {one for one in (place.with_suffix(".py"), place / "__init__.py") if one.exists()}
    return frozenset(found)


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names of modules that code imports when it runs, and `module.name` for each name of a module."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from (node.module, *(f"{node.module}.{one.name}" for one in node.names))
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(folder: str, extras: list[str]) -> int:
    """Say whether all cases of a folder are proved for what is or would be installed; the exit code is 0 if so."""
    try:
        found = installed()
        here = environment(found if "jax" in found else would_be_installed(extras))
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"what pip would install isn't known: {error}")
        return 1
    table = Table(here)
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).rglob("test_*.py"))]
    if missing := [file for file in files if not table.cases(file)]:
        print(f"not proved for these sources and versions: {', '.join(missing)}")
        return 1
    count = sum(len(table.cases(file)) for file in files)
    print(f"{count} cases of {folder} are proved for these very sources and versions ({PATH.relative_to(ROOT)})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
