"""Compiles a bundle of two pipeline stages, and generates with its programs alone; prints both as JSON.

Run with simulated devices: `python -m tests.cli.bundled_stages FOLDER SETTINGS PROMPT`, the last two in JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import main
from jaxserve.errors import ConfigError
from jaxserve.runtime.programs.builder import MeshProgramBuilder
from tests.cli.conftest import as_argv


def refuse(self: MeshProgramBuilder, key: object, dump: Path | None = None) -> None:
    raise AssertionError(f"{key} is compiled")


def run(folder: Path, settings: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """Return the names of the programs, the tokens of a greedy answer, and why another bundle is refused."""
    with contextlib.redirect_stdout(sys.stderr):
        assert main(["compile", "--output", str(folder), *as_argv(settings)]) == 0
        MeshProgramBuilder.compile = refuse  # type: ignore[assignment, method-assign]
        del settings["max_total_tokens"]  # the bundle's pool holds
        with LLM(**settings, programs=str(folder)) as llm:
            sampling = SamplingParams(max_tokens=8, temperature=0.0)
            [answer] = llm.generate([prompt], sampling, use_tqdm=False)
        try:
            LLM(**settings | {"max_running_requests": 3}, programs=str(folder))
        except ConfigError as error:
            refusal = str(error)
    programs = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.xla"))
    return {"programs": programs, "tokens": answer.outputs[0].token_ids, "refusal": refusal}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), *map(json.loads, sys.argv[2:]))))
