"""`jaxserve compile --target` from the command line: the programs, the table, the exit code. Compiles for a CPU that
stands in for the target; `tests/aot` compiles for the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxserve.cli.main import main
from jaxserve.runtime import offline
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.programs import ProgramBuilder
from tests.cli.model_folder import write_config

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(offline, "target_mesh", lambda name, tensor: make_mesh(jax.devices("cpu"), tensor=tensor))
    model = write_config(tmp_path / "small.json", **SMALL)
    flags = ["--attention-backend", "reference", "--max-running-requests", "4", "--cuda-graph-bs", "4"]
    return ["compile", model, "--target", "nvidia-h200", "--chunked-prefill-size", "16", "--dtype", "float32", *flags]


def test_every_program_is_compiled_and_shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["program", "seconds"]
    names = [line.split()[0] for line in lines[1:6]]
    assert sorted(names) == sorted(
        ["prompt_logprobs-128-full", "mixed-16-full", "decode-4-greedy", "decode-4-full", "update"]
    )
    assert "5 of 5 programs are good" in lines[-1]


def test_programs_by_name_as_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--only", "decode-*-greedy", "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)["programs"]
    assert program["name"] == "decode-4-greedy"
    assert program["alias_bytes"] > 0
    assert program["fault"] is None
    assert main([*argv, "--only", "nothing"]) == 2
    assert "no program is called 'nothing'; there are update, decode-4-greedy" in capsys.readouterr().err


def test_a_program_that_does_not_build_fails_the_command(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_one: Callable[..., jax.stages.Compiled] = ProgramBuilder.compile

    def sometimes(self: ProgramBuilder, key: object) -> jax.stages.Compiled:
        if str(key) == "decode-4-full":
            raise RuntimeError("registers ran out")
        return compile_one(self, key)

    monkeypatch.setattr(ProgramBuilder, "compile", sometimes)
    assert main([*argv, "--only", "decode-*"]) == 1
    out = capsys.readouterr().out
    assert "not built" in out
    assert "decode-4-full can't be used: RuntimeError: registers ran out" in out
    assert "1 of 2 programs are good" in out


def test_a_target_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile"]) == 2
    assert "tpu-v7" in capsys.readouterr().err
