"""`jaxserve compile` and `jaxserve plan --compile` for devices that aren't here, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import compile, plan
from jaxserve.runtime.devices.target import target_names
from tests.aot.deployments import LLAMA_8B_TWO_LAYERS
from tests.selection import grid

pytestmark = pytest.mark.aot

ON_A_GPU = {"registers", "stack_bytes", "shared_bytes", "threads"}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B_TWO_LAYERS))
    return str(path)


def _programs(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return {program["name"]: program for program in json.loads(capsys.readouterr().out)["programs"]}


@pytest.mark.parametrize("target", target_names())
def test_every_target_compiles(target: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile.main([llama, "--target", target, "--only", "decode-8-greedy", "--json"]) == 0
    [program] = _programs(capsys).values()
    assert program["fault"] is None
    assert program["alias_bytes"] > 2**30
    assert program["unread"] is None
    assert program["own_kernels"]
    for kernel in program["own_kernels"]:
        known = {name for name, figure in kernel.items() if figure is not None} - {"kernel", "calls"}
        assert known == ({"vmem_bytes"} if target.startswith("tpu") else ON_A_GPU)


def test_four_shards_have_the_necessary_collectives(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [llama, "--target", "nvidia-h100", "--tp-size", "4", "--json"]
    assert compile.main([*argv, "--only", "decode-8-greedy"]) == 0
    [program] = _programs(capsys).values()
    assert program["collectives"] == {"all-reduce": 2 * 2 + 3}


@pytest.mark.parametrize("target", grid(["nvidia-h200", "tpu-v6e"], lambda target: target == "nvidia-h200"))
def test_the_estimate_is_no_less_than_the_compiler_needs(
    target: str, llama: str, capsys: pytest.CaptureFixture[str], compared_with: Callable[[Any], None]
) -> None:
    argv = [llama, "--target", target, "--cuda-graph-bs", "256", "--json"]
    assert plan.main(argv) == 0
    estimated = json.loads(capsys.readouterr().out)
    compared_with(estimated)
    assert plan.main([*argv, "--compile"]) == 0
    compiled = json.loads(capsys.readouterr().out)
    assert compiled["temp_source"].startswith("the compiler's")
    assert compiled["max_total_num_tokens"] >= estimated["max_total_num_tokens"], "sized by the figure"
    assert estimated["temp_bytes"] / 4 < compiled["temp_bytes"] <= estimated["temp_bytes"]


def test_a_bundle_for_a_target_leaves_products_to_cublaslt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1,
             "intermediate_size": 1024, "vocab_size": 1024}  # fmt: skip
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**LLAMA_8B_TWO_LAYERS, **small}))
    sizes = ["--max-running-requests", "4", "--cuda-graph-bs", "4", "--chunked-prefill-size", "128"]
    argv = [str(path), "--target", "nvidia-h200", "--output", str(tmp_path / "bundle"), *sizes, "--json"]
    assert compile.main(argv) == 0
    programs = _programs(capsys)
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["target"] == "nvidia-h200"
    assert manifest["facts"]["device"] == "gpu NVIDIA H200", "as the attached device is called"
    assert sorted(manifest["programs"]) == sorted(programs)
    for name, program in programs.items():
        assert (tmp_path / "bundle" / f"{name}.xla").stat().st_size > 10_000
        if "-" in name:  # a step, or one that draws, which has only the product of the logits
            least = 1 if name.startswith("draw-") else 5
            assert program["kernels"].get("cublas lt matmul", 0) >= least
            assert not any("gemm_fusion" in kernel for kernel in program["kernels"])
