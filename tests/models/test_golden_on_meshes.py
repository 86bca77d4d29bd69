"""Models split over devices compute Hugging Face's logits, whatever their heads, norms and orders of dimensions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.golden import FOLDERS
from tests.models.pooled import FOLDERS as POOLED
from tests.selection import grid

ROOT = Path(__file__).parents[2]

QUICK = ["llama3/4", "olmo2/4", "glm4/2", "gemma4/4", "deepseek_v3/4", "qwen3_next/4"]
"""KV heads that shards share; norms over the heads of all shards besides; reordered heads, fused tensors, biases;
layers that reuse keys and values, and a second table; latent rows that every shard has; key heads with their groups."""
QUANTIZED = ["quantized/awq_glm4/2", "quantized/gptq_act_order/4", "packed:quantized/gptq_8bit_asymmetric/2"]
"""Reordered heads; inputs in another order, which are not divided, and shared heads; strips and blocks of a CPU."""
POOLED_QUICK = ["pooled:llama_mean_dense/2", "pooled:qwen2_reward/2", "pooled:qwen3_reranker/2"]
"""Layers after pooling that every shard has, with biases, and of rows of the embedding that shards divide."""
MIXTURES = ["mixtral/4/2/1", "glm4_moe/1/1/4", "gpt_oss/2/1/2", "gemma4_moe/2/2/1"]
MIXTURES += ["gguf:quantized/gpt_oss_mxfp4/4/2/1"]
"""Two devices divide each expert; ranks with experts of their own, of one device, and of two that divide each expert
and its biases; experts beside an MLP; parts of stacked tensors."""
MORE_MIXTURES = ["qwen3_moe/4/4/1", "olmoe/2/2/2", "gguf:mixtral/4/2/1", "gguf:glm4_moe/1/1/4", "deepseek_v2/2/1/2"]
MORE_MIXTURES += ["gguf:deepseek_v3/1/1/4", "gguf:deepseek_v2_lite/4/2/1"]
ALL = [f"{name}/{shards}" for name in FOLDERS for shards in (1, 2, 4)]
ALL += [f"pooled:{name}/2" for name in POOLED]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "cases",
    grid([QUICK + MIXTURES + QUANTIZED + POOLED_QUICK, MORE_MIXTURES, ALL], lambda cases: cases[0] == QUICK[0]),
    ids=["quick", "more-mixtures", "all"],
)
def test_logits_equal_hugging_face_on_any_mesh(cases: list[str]) -> None:
    """One process computes all cases, because most of a short one's time goes to its start."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.models.golden_on_meshes", *cases]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-5000:]
    found: dict[str, float | None] = json.loads(run.stdout.splitlines()[-1])
    assert list(found) == cases
    computed = {case: difference for case, difference in found.items() if difference is not None}
    names = [{re.sub(r"(/\d)+$", "", case) for case in some} for some in (computed, cases)]
    assert names[0] == names[1]
    # Bfloat16 is compared with itself in another order of additions; logits differ by 2 from one to another
    most = {case: 0.2 if case.startswith("packed:") else 1e-4 for case in computed}
    assert not {case: difference for case, difference in computed.items() if not difference < most[case]}
