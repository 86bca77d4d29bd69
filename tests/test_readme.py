"""What the README says about the code is what the code says."""

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from jaxserve.cli import chat, compile, config, convert, doctor, generate, plan, pull, serve
from jaxserve.cli.bench import SUBCOMMANDS
from jaxserve.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PARSERS = {
    **{f"bench {name}": importlib.import_module(f"jaxserve.cli.bench.{name}") for name in SUBCOMMANDS},
    "chat": chat,
    "compile": compile,
    "config explain": config,
    "convert": convert,
    "doctor": doctor,
    "generate": generate,
    "plan": plan,
    "pull": pull,
    "serve": serve,
}


def test_the_tables_are_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    written = runpy.run_path(str(ROOT / "scripts" / "readme_tables.py"))["written"](readme)
    assert written == readme, "run .venv/bin/python scripts/readme_tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_shown_can_be_parsed(page: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for line in re.findall(r"^jaxserve (.+)$", "".join(blocks), flags=re.M):
        name = next(name for name in PARSERS if line.startswith(name))
        PARSERS[name].parser().parse(shlex.split(line.removeprefix(name), comments=True))
    assert {name.split()[0] for name in PARSERS} == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_and_path_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for path in re.findall(r"`((?:configs|scripts|benchmarks|jaxserve|pallas_kernels|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
