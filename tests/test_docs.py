"""Every flag, metric, route and path that the guides in docs/ name exists, and so does every heading they link to."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jaxserve.cli import convert, doctor, serve
from jaxserve.cli.bench import SUBCOMMANDS
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.engine.scheduling.policy import LPM_MAX_WAITING, MAX_OVERTAKEN, Policy
from jaxserve.observability.log import decode_line, prefill_line
from jaxserve.observability.metrics import Metrics
from jaxserve.server.app import make_app
from jaxserve.server.openai.protocol import ChatRequest
from jaxserve.server.server_state import Serving

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TUNING = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")

BENCH = {f"bench {name}": importlib.import_module(f"jaxserve.cli.bench.{name}") for name in SUBCOMMANDS}


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def text(request: pytest.FixtureRequest) -> str:
    return request.param.read_text(encoding="utf-8")


def test_every_flag_exists(text: str) -> None:
    modules = (serve, doctor, convert, *BENCH.values())
    known = {option for module in modules for option in module.parser()._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert named - known == set()


def test_every_metric_is_served(text: str) -> None:
    served = Metrics("tiny", lambda: None).render().decode()
    families = set(re.findall(r"^# TYPE (\S+)", served, flags=re.M))
    assert set(re.findall(r"jaxserve:\w+", text)) - families == set()


def test_every_route_exists(text: str) -> None:
    routes = {route.path for route in make_app(Serving(ServerConfig(), EngineConfig())).routes}
    assert set(re.findall(r"`(/[\w/]+)`", text)) - routes == set()


def test_every_link_leads_to_a_heading(text: str) -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, flags=re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) - headings == set()


def test_every_path_exists(text: str) -> None:
    for path in re.findall(r"`((?:configs|scripts|benchmarks|jaxserve|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_every_command_line_can_be_parsed(text: str) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S):
        for name, line in re.findall(r"^jaxserve ((?:bench )?\w+) (.+)$", block, flags=re.M):
            module = {"convert": convert, "doctor": doctor, "serve": serve, **BENCH}[name]
            module.parser().parse(shlex.split(line, comments=True))


def test_the_log_lines_shown_are_those_that_are_written() -> None:
    assert (
        prefill_line(
            new_seq=2, new_token=611, cached_token=1024, token_usage=0.81, running=232, queued=418, hit_rate=1024 / 1635
        )
        in TUNING
    )
    line = decode_line(
        running=233, tokens=370959, token_usage=0.82, throughput=4594.01, queued=417,
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
