"""What README.md, CONTRIBUTING.md and docs/ name exists: flags, metrics, routes, paths, links, commands, functions."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from jaxserve.cli import chat, compile, config, convert, doctor, generate, plan, pull, serve
from jaxserve.cli.bench import SUBCOMMANDS
from jaxserve.cli.main import COMMANDS
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.engine.scheduling.policy import LPM_MAX_WAITING, MAX_OVERTAKEN, Policy
from jaxserve.observability.log import decode_line, prefill_line
from jaxserve.observability.metrics import Metrics
from jaxserve.server.app import make_app
from jaxserve.server.openai.protocol import ChatRequest
from jaxserve.server.server_state import ServerState

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUNING = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
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
# Flags that are named and belong to other programs: XLA, the benchmark of a server beside another one, and the tuner.
OTHER_FLAGS = {"--xla_force_host_platform_device_count", "--peer", "--kernel"}


@pytest.fixture(params=PAGES, ids=lambda page: page.stem)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_reference_tables_are_up_to_date() -> None:
    with_tables = runpy.run_path(str(ROOT / "scripts" / "reference_tables.py"))["with_tables"]
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert with_tables(text) == text, f"{page}: run .venv/bin/python scripts/reference_tables.py"


def test_every_flag_exists(text: str) -> None:
    known = {option for module in PARSERS.values() for option in module.parser()._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert named - known - OTHER_FLAGS == set()


def test_every_metric_is_served(text: str) -> None:
    served = Metrics("tiny", lambda: None).render().decode()
    families = set(re.findall(r"^# TYPE (\S+)", served, flags=re.M))
    assert set(re.findall(r"jaxserve:\w+", text)) - families == set()


def test_every_route_exists(text: str) -> None:
    routes = {route.path for route in make_app(ServerState(ServerConfig(), EngineConfig())).routes}
    assert set(re.findall(r"`(?:GET |POST )?(/[\w/]+)`", text)) - routes == set()


def test_every_link_leads_to_a_page_and_a_heading(page: Path, text: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_path_exists(text: str) -> None:
    for path in re.findall(r"`((?:configs|scripts|benchmarks|jaxserve|pallas_kernels|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_every_make_target_exists(text: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_every_command_line_can_be_parsed(text: str) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S):
        for line in re.findall(r"^jaxserve (.+)$", block, flags=re.M):
            name = next(name for name in PARSERS if line.startswith(name))
            PARSERS[name].parser().parse(shlex.split(line.removeprefix(name), comments=True))


def test_every_command_has_a_parser_here() -> None:
    assert {name.split()[0] for name in PARSERS} == set(COMMANDS)


def test_the_architecture_names_every_folder() -> None:
    for package in ("jaxserve", "pallas_kernels"):
        for folder in (ROOT / package).rglob("*/"):
            if list(folder.glob("[a-z]*.py")):
                assert re.search(rf"\b{folder.name}/", ARCHITECTURE), folder


def test_every_name_in_the_walk_of_a_request_is_in_its_file() -> None:
    stations = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| (.+?) \|", ARCHITECTURE, flags=re.M)
    assert len(stations) > 20
    for file, names in stations:
        source = (ROOT / "jaxserve" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)(?:\(\))?`", names):
            for part in name.split("."):
                assert re.search(rf"(?:def|class) {part}\b", source), f"{file} has no {part}"


def test_the_log_lines_shown_are_those_that_are_written() -> None:
    assert (
        prefill_line(
            new_seq=2, new_token=611, cached_token=1024, usage=(0.81,), running=232, queued=418, hit_rate=1024 / 1635
        )
        in TUNING
    )
    line = decode_line(
        running=233, tokens=370959, usage=(0.82,), throughput=4594.01, queued=417,
        fine=True, bucket=256, padding=1 - 233 / 256,
    )  # fmt: skip
    assert line in TUNING


def test_the_bounds_named_are_those_in_force() -> None:
    assert f"overtaken by at most {MAX_OVERTAKEN} later arrivals" in TUNING
    assert f"more than {LPM_MAX_WAITING} requests wait" in TUNING
    assert {policy for policy in Policy.__args__ if f"| `{policy}`" in TUNING} == set(Policy.__args__)


def test_the_fields_named_exist() -> None:
    for name in ("priority", "cache_salt", "stream_options", "n", "max_tokens"):
        assert f"`{name}`" in TUNING
        assert name in ChatRequest.__struct_fields__
