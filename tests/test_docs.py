"""What README.md, CONTRIBUTING.md and docs/ name exists: flags, metrics, routes, paths, links, commands, functions.

Tables of names have those of the code, and figures and times are the same wherever they stand.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import runpy
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from jaxserve.bench.datasets.choice import DATASETS
from jaxserve.cli import chat, compile, config, convert, doctor, generate, plan, pull, serve, translate
from jaxserve.cli.bench import SUBCOMMANDS
from jaxserve.cli.common.parser import Parser
from jaxserve.cli.main import COMMANDS
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.engine.scheduling.policy import LPM_MAX_WAITING, MAX_OVERTAKEN, Policy
from jaxserve.errors import ConfigError
from jaxserve.model_source.fields import Fields
from jaxserve.models.registry import parse_model_config
from jaxserve.observability.log import decode_line, prefill_line
from jaxserve.observability.metrics import Metrics
from jaxserve.quant import GGUF_TYPES, OnTheFly, read_quantization
from jaxserve.server.app import make_app
from jaxserve.server.openai.protocol import ChatRequest
from jaxserve.server.server_state import ServerState
from pallas_kernels.paged_attention import BACKENDS, BackendName

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README, CONTRIBUTING, MAKEFILE, TUNING, ARCHITECTURE, SUPPORT, QUANTIZATION, SPECULATION, BENCHMARKING, PERFORMANCE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in (
        *("README.md", "CONTRIBUTING.md", "Makefile", "docs/tuning.md", "docs/architecture.md", "docs/support.md"),
        *("docs/quantization.md", "docs/speculation.md", "docs/benchmarking.md", "docs/performance.md"),
    )
)
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
    "translate": translate,
}
# Flags that are named and belong to other programs: XLA, the benchmark of another server, the tuner, gateways, and Ray.
OTHER_FLAGS = {
    *("--xla_force_host_platform_device_count", "--peer", "--kernel", "--api-processes"),
    *("--worker-urls", "--xla_dump_to", "--policy", "--dp-aware", "--pd-disaggregation", "--vllm-pd-disaggregation"),
    *("--kv-event-block-size", "--kv-event-model", "--kv-event-source"),
    *("--health-check-endpoint", "--health-check-interval-secs", "--health-check-timeout-secs"),
    *("--health-failure-threshold", "--health-success-threshold"),
    *("--cb-failure-threshold", "--cb-timeout-duration-secs", "--load-monitor-interval"),
    *("--head", "--address", "--generate", "--id", "--err"),
    *("--worker-startup-check-interval", "--worker-overload-waiting-requests", "--worker-overload-token-usage"),
}


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


@functools.cache
def parser_of(command: str) -> Parser:
    return PARSERS[command].parser()


def test_every_flag_exists(text: str) -> None:
    known = {option for command in PARSERS for option in parser_of(command)._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert named - known - OTHER_FLAGS == set()


def test_every_metric_is_served(text: str) -> None:
    served = Metrics("tiny", lambda: None).render().decode()
    families = set(re.findall(r"^# TYPE (\S+)", served, flags=re.M))
    assert set(re.findall(r"jaxserve:\w+", text)) - families == set()


def test_every_route_exists(text: str) -> None:
    routes = {
        route.path
        for route in make_app(ServerState(ServerConfig(enable_tokenizer_info_endpoint=True), EngineConfig())).routes
    }
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
            parser_of(name).parse(shlex.split(line.removeprefix(name), comments=True))


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


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of all rows of the first table whose first column has this header."""
    table = re.search(rf"^\| {re.escape(header)} \|.*\n\|[-| :]+\|\n((?:\|.*\n)+)", text, flags=re.M)
    assert table, header
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[1].splitlines()]


def named_in(message: Any) -> set[str]:
    """Return the names that an error lists as supported."""
    return set(re.split(r", (?:and .*)?", re.sub(r".*supported: ", "", str(message)))) - {""}


def test_the_families_are_those_that_are_served() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_model_config({"architectures": ["Unknown"]})
    table = rows(SUPPORT, "family")
    assert set(re.findall(r"`(\w+(?:For\w+|Model))`", " ".join(row[1] for row in table))) == named_in(refused.value)
    shown = " ".join(
        re.findall(
            r"(?:dense models|mixtures of experts|delta nets and attention|encoders): (.+?)\.(?: |$)",
            README,
            flags=re.M,
        )
    )
    in_readme, in_support = (
        set(re.findall(r"[A-Za-z][A-Za-z-]{2,}", names)) - {"and", "dense"}
        for names in (shown, " ".join(row[0] for row in table))
    )
    assert in_readme == in_support


def test_the_quantizations_are_those_that_are_read() -> None:
    with pytest.raises(ConfigError) as refused:
        read_quantization(Fields({"quantization_config": {"quant_method": "unknown"}}, "config.json"))
    methods = {row[0].strip("`") for row in rows(QUANTIZATION, "`quant_method`")}
    assert methods - {"GGUF"} == named_in(refused.value)
    [types] = re.findall(r"GGUF types:\*\* (.+)\.$", SUPPORT, flags=re.M)
    assert set(types.split(", ")) == {"F32", "F16", "BF16", *GGUF_TYPES}


@pytest.mark.parametrize(
    ("text", "header", "names"),
    [
        (SUPPORT, "backend", BACKENDS.names),
        (QUANTIZATION, "backend", get_args(BackendName)),
        (QUANTIZATION, "`--quantization`", get_args(OnTheFly)),
        (SPECULATION, "`--speculative-method`", get_args(get_type_hints(EngineConfig)["speculative_method"])),
        (BENCHMARKING, "name", DATASETS),
    ],
)
def test_a_table_has_the_names_of_the_code(text: str, header: str, names: Collection[str]) -> None:
    assert {name for row in rows(text, header) for name in re.findall(r"`([\w-]+)`", row[0])} == set(names) - {"none"}


def test_the_times_of_tests_are_the_same_everywhere() -> None:
    times = dict(re.findall(r"^(make [a-z-]+) +# ([^:\n]*(?:minute|hour)[^:\n]*):", CONTRIBUTING, flags=re.M))
    assert {"make check", "make test", "make test-aot"} <= set(times)
    for command, time in times.items():
        assert re.search(rf"echo '{command} +{re.escape(time)}:", MAKEFILE), command
    assert times["make test"] in README


def test_the_figures_are_those_that_were_measured() -> None:
    results = ROOT / "benchmarks" / "results"
    serving = json.loads((results / "cpu" / "serving_cpu.json").read_text(encoding="utf-8"))["results"]
    readme, page = rows(README, "load"), str(rows(PERFORMANCE, "load"))
    for column, engine in enumerate(("jaxserve", "vllm"), start=1):
        for row, load in zip(readme, ("1", "16"), strict=True):
            found = serving[engine][load]
            assert row[column].startswith(f"{found['output_tok_s']:.0f} tokens/s")
            assert row[column].endswith(f"{found['ttft_ms']:,.0f} ms")
            assert f"'{found['output_tok_s']:.1f}'" in page
        assert all(f"'{found['ttft_ms']:,.0f} ms'" in page for found in serving[engine].values())
    device = json.loads((results / "nvidia-h100-80gb-hbm3" / "device.json").read_text(encoding="utf-8"))["rows"]
    steps = {row["name"]: 1000 / row["value"] for row in device if row["name"].endswith("steps/s")}
    speeds = {row["name"]: f"{row['value']:,.0f}" for row in device if " offline " in row["name"]}
    assert all(f"| {step:.2f} ms |" in PERFORMANCE for step in steps.values())
    assert all(f"| {speed}" in PERFORMANCE for speed in speeds.values())
    assert f"{speeds['Llama-3.1-8B offline 1000/1000: output']} output tokens/s" in README
    assert f"takes {steps['Llama-3.1-8B decode 128 x 1024: steps/s']:.1f} ms" in README
