"""On any mesh a shard holds its part of every tensor, and no more is read from the files than the shards hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import host
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, parse_model_config
from tests.weights.conftest import converted, random_checkpoint

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 99,
    "tie_word_embeddings": False,
}
"""Two KV heads that shards share, biases, and a vocabulary that needs padding wherever it is split."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = LaidOutModel(parse_model_config(CONFIG))
    save_file(random_checkpoint(abstract_params(model, np.dtype(np.float32))), tmp_path / "model.safetensors")
    return tmp_path


def start(arguments: list[str], devices: int) -> subprocess.Popen[str]:
    """Start on_meshes.py in a process that sees `devices` CPU devices."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    command = [sys.executable, "-m", "tests.weights.on_meshes", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    out, log = process.communicate()
    assert process.returncode == 0, log[-5000:]
    found: dict[str, dict[str, int]] = json.loads(out.splitlines()[-1])
    return found


def test_a_process_reads_each_shard_once(folder: Path) -> None:
    found = result(start(["single", str(folder), "1x1", "1x2", "2x2", "2x4", "1x8", "8x1"], 8))
    for shape in ("1x1", "1x2", "2x2", "8x1"):  # shards share nothing: the whole checkpoint is read, once
        assert found[shape]["read"] == found[shape]["checkpoint"], shape
    for shape, one in found.items():  # padding is not read; a shared KV head is read by each shard
        rows = CONFIG["vocab_size"] % int(shape[-1]) and int(shape[-1]) - CONFIG["vocab_size"] % int(shape[-1])
        assert one["read"] == one["shards"] - 2 * rows * CONFIG["hidden_size"] * 4, shape


def test_an_orbax_checkpoint_is_restored_onto_any_mesh(folder: Path, tmp_path: Path) -> None:
    """Compares each shard with the stored parameter; test_orbax.py compares that with the source."""
    target = tmp_path / "converted"
    converted(folder, target, np.float32)
    shapes = ["1x1", "1x2", "2x4", "1x4", "1x8"]
    found = result(start(["single", str(target), *shapes], 8))
    assert list(found) == shapes


def test_a_process_reads_what_its_own_devices_hold(folder: Path) -> None:
    address = f"127.0.0.1:{host.free_port()}"
    processes = [start([f"{address}/{rank}", str(folder), "1x8", "1x2"], 4) for rank in range(2)]
    found = [result(process) for process in processes]
    for one in found:
        assert one["1x8"]["read"] < 0.6 * one["1x8"]["checkpoint"]
    assert found[1]["1x2"]["read"] == 0, "its first two devices are the other's"
