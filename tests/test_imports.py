"""Which module may import which, as docs/architecture.md says, read from the syntax trees; and what starts without jax,
checked in processes.
"""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {
    "accelerators",
    "error_texts",
    "errors",
    "framing",
    "host",
    "api_types",
    "step_plan",
    "params",
    "model_source",
}
BASE = GROUND | {"config", "observability"}

# What each room may import of jaxserve besides itself. Of the engine, other rooms see only `engine.client`. What `cli`
# uses of the runtime is imported when a command runs, so that it starts without jax.
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    "config": GROUND,
    "observability": GROUND,
    "engine": BASE,
    "quant": BASE,
    "layers": BASE | {"quant"},
    "models": BASE | {"quant", "layers"},
    "weights": BASE | {"quant", "layers", "models"},
    "runtime": BASE | {"quant", "layers", "models", "weights"},
    "worker": BASE | {"engine", "quant", "layers", "models", "weights", "runtime", "text"},
    "text": BASE,
    "server": BASE | {"text", "engine.client"},
    "llm": BASE | {"text", "engine.client"},
    "bench": BASE | {"text"},
    "cli": BASE | {"text", "server", "llm", "bench", "runtime", "engine.client", "weights.convert"},
    "__main__": {"cli"},
    "__init__": {"llm", "api_types", "config"},
}
# The folders and files inside a room, lowest first: each imports only itself and those before it. Files of the same
# tuple may import each other.
ORDER_INSIDE = {
    "jaxserve.engine": ["grammar", "kv_cache", "speculation", "scheduling", "core", "multihost", "process", "client"],
    "jaxserve.runtime": ["devices", "speculation", "step", "programs", "sizing", "execution"],
    "jaxserve.bench": ["datasets", "load", "results", "processes", "engine", "sweep", "tune",
                       "accuracy"],
    "jaxserve.cli": ["common", "bench", ("chat", "compile", "config", "convert", "doctor", "generate", "plan", "pull",
                                         "serve"), "main"],
    "jaxserve.server": ["errors", "server_state", "http", "generation", "openai", "sglang", "admin", "app", "follower",
                        "lifecycle"],
    "pallas_kernels.paged_attention": ["layout", "problem", "arguments", ("pages", "tuning", "write"), "reference",
                                       "cpu", "triton", "mosaic_gpu", "mosaic_tpu", "backends", "api"],
}  # fmt: skip
# The folders of `jaxserve.server` with the routes of an API.
APIS = ("openai", "sglang")
WITHOUT_JAX = {*BASE, "engine", "text", "server", "llm", "bench", "cli", "__main__", "__init__"}
JAX = {"jax", "jaxlib", "flax", "jaxtyping", "orbax", "pallas_kernels"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_room = parts[-1] == "__init__" and len(parts) > 2
        yield ".".join(parts[:-1] if is_room else parts), path


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever it stands in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = ROOT / node.module.replace(".", "/") / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def room_of(module: str) -> str:
    return module.split(".")[1]


JAXSERVE = list(modules("jaxserve"))


def test_every_room_has_its_rule() -> None:
    assert {room_of(module) for module, _ in JAXSERVE} <= set(MAY_IMPORT)


@pytest.mark.parametrize(("module", "path"), JAXSERVE, ids=[module for module, _ in JAXSERVE])
def test_a_module_imports_only_what_its_room_may(module: str, path: Path) -> None:
    room = room_of(module)
    allowed = MAY_IMPORT[room] | {room}
    for name in imported(path):
        if name.startswith("jaxserve."):
            inner = name.removeprefix("jaxserve.")
            assert inner.split(".")[0] in allowed or inner in allowed, f"{module} imports {name}"
        elif room in WITHOUT_JAX:
            assert name.split(".")[0] not in JAX, f"{module} imports {name}"


@pytest.mark.parametrize("room", ORDER_INSIDE)
def test_folders_inside_a_room_import_only_those_below(room: str) -> None:
    level = {
        name: index
        for index, names in enumerate(ORDER_INSIDE[room])
        for name in ([names] if isinstance(names, str) else names)
    }
    for module, path in modules(room.replace(".", "/")):
        importer = module.removeprefix(room).removeprefix(".").split(".")[0]
        if importer in ("", "__init__"):
            continue
        for name in imported(path):
            inner = name.removeprefix(f"{room}.").split(".")[0]
            if name.startswith(f"{room}.") and inner != importer:
                missing = {inner, importer} - level.keys()
                assert not missing, f"ORDER_INSIDE[{room!r}] has no place for {missing}"
                assert level[inner] <= level[importer], f"{module} imports {name}"


@pytest.mark.parametrize(("api", "other"), [*itertools.permutations(APIS, 2)])
def test_the_routes_of_an_api_know_no_other_api(api: str, other: str) -> None:
    for module, path in modules(f"jaxserve/server/{api}"):
        assert not [name for name in imported(path) if name.startswith(f"jaxserve.server.{other}.")], module


def test_the_kernels_know_nothing_of_jaxserve() -> None:
    for module, path in modules("pallas_kernels"):
        assert not [name for name in imported(path) if name.split(".")[0] == "jaxserve"], module


def loaded_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    report = "import sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.splitlines()}


@pytest.mark.parametrize("room", sorted(WITHOUT_JAX - {"__main__", "__init__"}))
def test_a_room_starts_without_jax(room: str) -> None:
    names = [module for module, _ in JAXSERVE if room_of(module) == room]
    if names:
        assert not loaded_after("\n".join(f"import {name}" for name in names)) & {"jax", "jaxlib"}


def test_importing_jaxserve_imports_nothing_yet() -> None:
    assert not loaded_after("import jaxserve") & {"jax", "numpy", "msgspec", "transformers", "tokenizers"}


def test_what_make_install_runs_needs_nothing_installed() -> None:
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import jaxserve.accelerators"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_names_of_the_package_come_when_they_are_used() -> None:
    assert not loaded_after("from jaxserve import LLM, SamplingParams, EngineConfig") & {"jax", "jaxlib"}


def test_help_imports_little_more_than_argparse() -> None:
    code = "from jaxserve.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert not loaded_after(code) & {"jax", "numpy", "msgspec", "yaml", "transformers", "starlette"}
