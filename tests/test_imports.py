"""Which module may import which, as docs/architecture.md says, and that classes have names of their own, read from the
syntax trees; and what starts without jax, checked in processes.
"""

from __future__ import annotations

import ast
import functools
import graphlib
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
    "ray": BASE | {"server", "engine.client"},
    "bench": BASE | {"text"},
    "cli": BASE | {"text", "server", "llm", "bench", "runtime", "engine.client", "weights.convert"},
    "__main__": {"cli"},
    "__init__": {"llm", "api_types", "config"},
}
# The folders and files inside a room, by level, lowest first: each imports only those of lower levels, types included,
# and at least one of the level just below.
ORDER_INSIDE = {
    "jaxserve.bench": "datasets processes | engine load | results | accuracy sweep | tune",
    "jaxserve.cli": "common | bench chat compile config convert doctor generate main pull serve translation | "
                    "plan translate",
    "jaxserve.config": "foreign_readers mappings metric_settings nearest other_engines pipeline processes "
                       "sampling_defaults speculation threads | kv_events ranges | schema server_schema | "
                       "data_parallel model_files settings | device_numbers load served_checkpoint | explain",
    "jaxserve.engine": "kv_cache multihost speculation | scheduling | core | process | client",
    "jaxserve.layers": "axes batch exchange | linear norm rope vocabulary | attention delta_net embedding mlp | "
                       "latent_attention mixture",
    "jaxserve.llm": "outputs | generation pooling | llm",
    "jaxserve.model_source": "builtin_models fields gguf_row hub pooling | architectures builtin gguf_encoders "
                             "gguf_metadata sentence_modules | encoder_heads gguf_architectures gguf_pooling | "
                             "gguf_config | source | generation_config token_ids | label_heads | tasks",
    "jaxserve.models": "config dtypes read_fields rope | layout | parameters | decoder other_attention | "
                       "encoders gemma llama | "
                       "cohere glm granite ministral3 mixtures olmo phi3 seed_oss smollm3 starcoder2 | "
                       "draft_heads exaone4 gemma4 qwen3_next | registry",
    "jaxserve.observability": "acceptance exposition stage_times throughput timeline turnover | engine_numbers log | "
                              "engine_metrics | counterparts sample | all_series tuning_advice | draft_rules metrics "
                              "stage_rules | tuning_rules",
    "jaxserve.quant": "stored | checkpoint | choice | transform",
    "jaxserve.ray": "autoscaling forwarding mesh metrics profile | ingress prefix_router replica | application",
    "jaxserve.runtime": "devices | step | programs | sizing | execution",
    "jaxserve.server": "errors fingerprint follower listener refusals request_log response_store siblings | "
                       "server_state | http loading model_tasks | admin generation | anthropic openai pooling "
                       "responses_api sglang | app | lifecycle | api_processes | serve",
    "jaxserve.text": "pooled_vectors prompt_forms stop_regex template_arguments tokenizers | detokenizer grammars "
                     "pooled_texts requests stop_strings | answers output pair_forms | template_tools | "
                     "chat_template | template_process",
    "jaxserve.weights": "arrays gguf_blocks gguf_heads mismatch parts scales source stacked_experts | "
                        "dummy finite hf kv_scales manifest | gguf orbax orbax_write quantized | convert load | open",
    "pallas_kernels": "cpu gpu_code target | dispatch tuning | "
                      "activation gated_delta ngram_lookup normalization paged_attention quantized_matmul sampling | "
                      "grouped_matmul packed_attention | expert_routing | tune",
    "pallas_kernels.activation": "cpu | api",
    "pallas_kernels.cpu": "types | emit | ffi maths tile_registers | compile",
    "pallas_kernels.expert_routing": "cpu routing | reference | api triton",
    "pallas_kernels.gated_delta": "inverse layout problem | arguments backends | api cpu reference | mosaic_tpu triton",
    "pallas_kernels.gpu_code": "wire | cubin riegeli | executable",
    "pallas_kernels.grouped_matmul": "gate groups tuning | epilogue | backends cpu mosaic_tpu reference triton | "
                                     "api mosaic_gpu",
    "pallas_kernels.ngram_lookup": "index | cpu reference | api",
    "pallas_kernels.normalization": "cpu reference | api",
    "pallas_kernels.packed_attention": "arguments | backends cpu mosaic_tpu reference triton | api",
    "pallas_kernels.paged_attention": "arguments layout problem | backends pages tuning write | "
                                      "api cpu mosaic_tpu reference triton | mosaic_gpu",
    "pallas_kernels.quantized_matmul": "scheme terms | layout tuning | backends mosaic_gpu mosaic_tpu reference xla | "
                                       "triton | activations | cpu | api",
    "pallas_kernels.sampling": "noise parameters | cpu reference triton | api",
    "pallas_kernels.tune": "task | attention experts products | __main__",
}  # fmt: skip
# The folders of `jaxserve.server` with the routes of an API.
APIS = ("anthropic", "openai", "pooling", "responses_api", "sglang")
WITHOUT_JAX = {*BASE, "engine", "text", "server", "llm", "ray", "bench", "cli", "__main__", "__init__"}
JAX = {"jax", "jaxlib", "flax", "jaxtyping", "orbax", "pallas_kernels"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_room = parts[-1] == "__init__" and len(parts) > 2
        yield ".".join(parts[:-1] if is_room else parts), path


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module that a file names in an import, wherever it stands in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            for alias in node.names:
                inner = ROOT / node.module.replace(".", "/") / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return frozenset(found)


def imports_inside(folder: str) -> dict[str, set[str]]:
    """Return which of its files and folders each file and folder in a folder imports."""
    found: dict[str, set[str]] = {}
    for module, path in modules(folder.replace(".", "/")):
        importer, *_ = module.removeprefix(folder).removeprefix(".").split(".")
        if importer not in ("", "__init__"):
            names = {
                name.removeprefix(f"{folder}.").split(".")[0]
                for name in imported(path)
                if name.startswith(f"{folder}.")
            }
            found.setdefault(importer, set()).update(names - {importer})
    return found


def room_of(module: str) -> str:
    return module.split(".")[1]


JAXSERVE = list(modules("jaxserve"))
FOLDERS = ["jaxserve", "pallas_kernels"] + [
    ".".join(path.relative_to(ROOT).parts)
    for package in ("jaxserve", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*/"))
    if list(path.glob("*.py"))
]
# `MAY_IMPORT` has the order of jaxserve itself.
ROOMS = [folder for folder in FOLDERS if folder.count(".") < 2 and folder != "jaxserve"]


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


@pytest.mark.parametrize("room", ROOMS)
def test_the_files_of_a_room_import_only_those_below(room: str) -> None:
    imports = imports_inside(room)
    if len(imports) < 2:
        assert room not in ORDER_INSIDE
        return
    level = {name: index for index, names in enumerate(ORDER_INSIDE[room].split(" | ")) for name in names.split()}
    assert set(level) == set(imports), f"ORDER_INSIDE[{room!r}] has a place for each file and folder, and no other"
    for name, lower in imports.items():
        assert all(level[each] < level[name] for each in lower), f"{room}.{name} imports {sorted(lower)}"
        below = max((level[each] + 1 for each in lower), default=0)
        assert level[name] == below, f"{room}.{name} belongs in level {below}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_of_a_folder_do_not_import_each_other_in_a_circle(folder: str) -> None:
    graphlib.TopologicalSorter(imports_inside(folder)).prepare()  # raises CycleError


def test_no_class_name_is_used_twice() -> None:
    names: dict[str, list[str]] = {}
    for module, path in (*JAXSERVE, *modules("pallas_kernels")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.TypeAlias):
                name = node.name if isinstance(node, ast.ClassDef) else node.name.id
                names.setdefault(name.lstrip("_"), []).append(module)
    for of_each_family in ("Config", "Params", "LayerParams"):  # used with their module's name
        del names[of_each_family]
    assert {name: found for name, found in names.items() if len(found) > 1} == {}


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
