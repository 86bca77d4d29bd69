"""A bundle has the programs of every pipeline stage and those that send between stages; nothing else is compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PROMPT = [1, 2, 3]


@pytest.mark.process
@pytest.mark.slow
def test_the_programs_of_all_stages_are_served_from_a_bundle(settings: dict[str, Any], tmp_path: Path) -> None:
    arguments = map(json.dumps, ({**settings, "pp_size": 2}, PROMPT))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.bundled_stages", str(tmp_path / "bundle"), *arguments],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    with LLM(**settings) as llm:
        [alone] = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    assert found["tokens"] == alone.outputs[0].token_ids
    names = {"stage-0/decode-4-full", "stage-1/decode-4-greedy", "transfer-0/send-4", "transfer-1/feedback"}
    assert {f"{name}.xla" for name in names} <= set(found["programs"])
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert sorted(f"{name}.xla" for name in manifest["programs"]) == found["programs"]
    assert "stage-0 was made for something else: sizes.num_slots is 4 in the bundle and 3 here" in found["refusal"]
