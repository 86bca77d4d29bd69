"""`jaxserve compile` from the command line: the programs, the table, the exit code, and a bundle that is served.

A CPU stands in for the target; `tests/aot` compiles for real ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.cli.compile import print_reports
from jaxserve.cli.main import main
from jaxserve.errors import ConfigError
from jaxserve.observability import log
from jaxserve.runtime.devices.mesh import make_stage_meshes
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.cost import Grouping, LaunchCost, ProgramCost
from jaxserve.runtime.programs.inspection import KernelReport, ProgramReport
from jaxserve.runtime.sizing import aot
from jaxserve.runtime.sizing.prediction import Prediction
from pallas_kernels import dispatch
from tests.cli.conftest import as_argv
from tests.cli.model_folder import write_config
from tests.tiny_model import tiny_settings

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _logging_stays() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "setup", lambda *given, **named: None)
        yield


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(
        aot, "target_meshes", lambda name, stages, **shape: make_stage_meshes(jax.devices("cpu"), stages, **shape)
    )
    monkeypatch.setattr(dispatch, "has_triton", lambda target: False)
    model = write_config(tmp_path / "small.json", **SMALL)
    flags = ["--attention-backend", "reference", "--max-running-requests", "4", "--cuda-graph-bs", "4"]
    return ["compile", model, "--target", "nvidia-h200", "--chunked-prefill-size", "16", "--dtype", "float32", *flags]


@pytest.mark.grid
def test_every_program_is_compiled_and_shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["program", "seconds"]
    names = [line.split()[0] for line in lines[1:8]]
    steps = ["decode-8-greedy", "decode-8-full", "mixed-16-full", "prompt_logprobs-128-full"]
    assert names == ["update", "adjust", "draw-8", *steps]
    assert "7 of 7 programs are good" in lines[-1]


def test_programs_by_name_as_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--only", "decode-*-greedy", "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)["programs"]
    assert program["name"] == "decode-8-greedy"
    assert program["alias_bytes"] > 0
    assert program["fault"] is None
    assert main([*argv, "--only", "nothing"]) == 2
    assert "no program is called 'nothing'; there are update, adjust, draw-8, decode-8" in capsys.readouterr().err


def test_programs_are_named_by_their_stage(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = make_stage_meshes(jax.devices("cpu"), 1)[0]
    monkeypatch.setattr(aot, "target_meshes", lambda name, stages, **shape: [mesh] * stages)
    assert main([*argv, "--pp-size", "2", "--only", "decode-*-full", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [program["name"] for program in found["programs"]] == ["stage-0/decode-8-full", "stage-1/decode-8-full"]
    assert found["not_compiled"] == ["transfer-0", "transfer-1"]
    assert "not compiled: transfer-0, transfer-1: target nvidia-h200 has no topology" in printed.err


def test_a_program_that_does_not_build_fails_the_command(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_one: Callable[..., jax.stages.Compiled] = ProgramBuilder.compile

    def sometimes(self: ProgramBuilder, key: object, dump: Path | None = None) -> jax.stages.Compiled:
        if str(key) == "decode-8-full":
            raise RuntimeError("registers ran out")
        return compile_one(self, key, dump)

    monkeypatch.setattr(ProgramBuilder, "compile", sometimes)
    assert main([*argv, "--only", "decode-*"]) == 1
    out = capsys.readouterr().out
    assert "not built" in out
    assert "decode-8-full can't be used: RuntimeError: registers ran out" in out
    assert "1 of 2 programs are good" in out


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle compiled by the command, for the tiny model on this CPU."""
    folder = tmp_path_factory.mktemp("bundle")
    assert main(["compile", "--output", str(folder), *as_argv(tiny_settings(tmp_path_factory))]) == 0
    return folder


def test_a_bundle_is_served_without_compiling(
    bundle: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(**settings) as llm:
        expected = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)

    def refuse(self: ProgramBuilder, key: object) -> None:
        raise AssertionError(f"{key} is compiled")

    monkeypatch.setattr(ProgramBuilder, "compile", refuse)
    del settings["max_total_tokens"]  # the bundle's pool holds
    with LLM(**settings, programs=str(bundle)) as llm:
        found = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"max_running_requests": 3}, "sizes.num_slots is 4 in the bundle and 3 here"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' in the bundle and 'bfloat16' here"),
        ({"max_total_tokens": 256}, "sizes.num_pages is 32 in the bundle and 16 here"),
    ],
)
def test_another_bundle_is_refused_with_the_difference(
    changed: dict[str, Any], why: str, bundle: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        LLM(**settings | changed, programs=str(bundle))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--target", "tpu-v6e", "--output", "{tmp}"],
            "--target tpu-v6e: only programs for NVIDIA GPUs are kept without a device",
        ),
        (
            ["--output", "x", "--only", "decode-*"],
            "--only and --output: a folder of programs must hold all of them; leave out --only",
        ),
    ],
)
def test_invalid_bundle_flags_are_refused(
    argv: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *(one.format(tmp=tmp_path) for one in argv)]) == 2
    assert line in capsys.readouterr().err


def test_more_shards_than_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config(tmp_path / "small.json", **SMALL)
    assert main(["compile", model, "--output", str(tmp_path / "x"), "--device", "cpu", "--tp-size", "4"]) == 2
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=4" in capsys.readouterr().err


def test_a_target_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile"]) == 2
    assert "tpu-v7" in capsys.readouterr().err


def _of_triton(*numbers: int | None) -> KernelReport:
    registers, stack_bytes, shared_bytes, threads = numbers
    return KernelReport("decode (triton)", 2, registers, stack_bytes, shared_bytes, threads)


def test_kernel_resources_are_shown_over_all_programs(capsys: pytest.CaptureFixture[str]) -> None:
    wide, narrow = _of_triton(168, 0, 0, 128), _of_triton(40, 24, 2560, 128)
    other = KernelReport("prefill (mosaic gpu)", 1, 200, 0, 3 * 2**10, 256)
    reports = [
        ProgramReport("update", 1.0),
        ProgramReport("decode-1-full", 1.0, own_kernels=[wide]),
        ProgramReport("decode-4-full", 1.0, own_kernels=[wide, narrow]),
        ProgramReport("mixed-16-full", 1.0, own_kernels=[other]),
    ]
    print_reports(reports, False, {})
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    first = lines.index(["kernel", "programs", "registers", "stack", "bytes", "shared", "KiB", "threads"])
    assert lines[first + 1] == ["decode", "(triton)", "2", "40-168", "0-24", "0.0-2.5", "128"]
    assert lines[first + 2] == ["prefill", "(mosaic", "gpu)", "1", "200", "0", "3.0", "256"]
    assert printed.err == ""


def test_tpu_kernel_resources_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [KernelReport("paged (mosaic tpu)", 2, vmem_bytes=size) for size in (2**22, 2**23)]
    print_reports([ProgramReport("decode-1-full", 1.0, own_kernels=kernels)], False, {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3:5] == [["kernel", "programs", "VMEM", "KiB"], ["paged", "(mosaic", "tpu)", "1", "4096-8192"]]


def test_the_cost_of_a_step_is_shown_beside_its_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = tuple(LaunchCost(f"kernel {i}", 2, i * 2**20, 2**20, 1e9) for i in range(12))
    report = ProgramReport("decode-8-full", 1.0, cost=ProgramCost(kinds, Grouping(5, 2, 3)))
    unknown = ProgramReport("update", 1.0, cost=ProgramCost(kinds[:1], None))
    predictions = {"decode-8-full": Prediction(limit=0.002, seconds=0.003, sequences=8, tokens=8)}
    print_reports([report, unknown], False, {}, predictions)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["decode-8-full", "24", "2", "3", "66.0", "12.0", "2.00", "3.00", "1.50"] in lines
    assert ["update", "2", "-", "-", "0.0", "1.0", "-", "-", "-"] in lines
    assert ["kernel", "11", "2", "11.0", "1.0", "1.0"] not in lines
    print_reports([report], False, {}, predictions, explain=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index(["decode-8-full"]) + 2] == ["kernel", "11", "2", "11.0", "1.0", "1.0"]
    assert ["kernel", "1", "2", "1.0", "1.0", "1.0"] not in lines, "the ten costliest"
    print_reports([report], True, {}, predictions)
    [program] = json.loads(capsys.readouterr().out)["programs"]
    assert program["prediction"] == {"limit": 0.002, "seconds": 0.003, "sequences": 8, "tokens": 8}
    assert {"launches": 24, "top": 5, "host_waits": 3, "read_bytes": 66 * 2**20}.items() <= program["cost"].items()


def test_unknown_resources_are_dashes_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = {"own_kernels": [_of_triton(None, None, None, None)], "unread": "no Riegeli file"}
    known = ProgramReport("decode-1-full", 1.0, own_kernels=[_of_triton(40, 0, 0, 128)])
    reports = [known, *(ProgramReport(name, 1.0, **unknown) for name in ("decode-2-full", "decode-4-full"))]
    print_reports(reports, False, {})
    printed = capsys.readouterr()
    assert printed.err == "the resources of kernels can't be read from decode-2-full: no Riegeli file\n"
    assert ["decode", "(triton)", "3", "-", "-", "-", "-"] in [line.split() for line in printed.out.splitlines()]
    print_reports(reports, True, {"target": "nvidia-h200"})
    first, second, _ = json.loads(capsys.readouterr().out)["programs"]
    assert first["own_kernels"] == [
        {"kernel": "decode (triton)", "calls": 2, "registers": 40, "stack_bytes": 0, "shared_bytes": 0, "threads": 128,
         "vmem_bytes": None}
    ]  # fmt: skip
    assert (first["unread"], second["unread"]) == (None, "no Riegeli file")
