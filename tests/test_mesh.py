"""The keystone on meshes, in one process or several: for any number of ranks and shards, the tokens are those of one
device.

CPU devices are simulated in child processes, because jax fixes the number of devices when it starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve import host
from tests.keystone_on_meshes import MODELS, sizes_of, write_model
from tests.selection import grid

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
SHAPES = [f"{data}x{tensor}" for data in (1, 2, 4) for tensor in (1, 2, 4) if data * tensor <= 8]
# A model with two KV groups
SHAPES += [f"{shape}-groups" for shape in ("1x1", "2x2", "4x1")]
# A mixture: experts of a rank divided, experts of all ranks divided, and both
SHAPES += [
    f"{shape}-mixture"
    for shape in ("1x1", "1x4", "1x4e2", "1x2e2", "2x2e4", "2x4e4", "4x1e4", "8x1e8", "4x2e8", "2x2e2")
]
SHAPES += ["1x1-windows", "2x2-windows"]
SHAPES += [f"{shape}-ragged" for shape in ("2x2e4", "2x4e4", "8x1e8")]
# Experts in layers of two KV groups
SHAPES += ["1x1-groups-mixture", "2x4e4-groups-ragged"]
# Latent rows: on one shard, on every shard of a rank, and with attention by ranks
SHAPES += ["1x1-latent", "1x2-latent", "2x2e2-latent", "2x2e4-latent-ragged", "4x1e4-latent-expanded"]
SHAPES += ["2x2-ngram", "1x2-draft", "2x2-draft"]
# Pipeline stages: beside ranks and shards, with one layer each, of different kinds, and with drafts
SHAPES += ["1x1p2", "1x2p2", "2x2p2", "1x1-deep", "1x1p4-deep", "1x2p4-deep", "2x1p4-deep", "1x1p2-uneven"]
SHAPES += ["1x1p2-groups", "1x1p3-groups", "2x1p2-windows", "1x2e2p2-mixture", "2x2e4p2-ragged", "1x2p2-groups-mixture"]
SHAPES += ["1x1p2-latent", "2x1e2p2-latent-ragged", "1x1p2-ngram", "2x1p2-ngram", "1x2p2-draft", "2x2p2-draft"]
SHAPES += ["1x1-latent-mtp", "1x2p2-latent-mtp"]
# States of sequences: by rank and shard, by stage, with drafts and with experts
SHAPES += ["1x1-hybrid", "2x2-hybrid", "1x4-hybrid", "1x1p3-hybrid", "2x2-hybrid-ngram", "1x2p2-hybrid-ngram"]
SHAPES += ["1x1-hybrid-mixture", "2x2e4-hybrid-ragged", "1x2e2p2-hybrid-mixture"]
# Pooled requests, between chats and alone
SHAPES += ["1x1-mean", "2x2p2-mean", "1x1-hybrid-last", "2x1p2-hybrid-last"]
SHAPES += ["1x1-groups-vectors", "2x2p3-groups-vectors"]
# Whole texts, which ranks share
SHAPES += ["1x1-encoder", "2x1-encoder"]
# Programs this small take longer to compile than to run.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


QUICK = ("1x1", "2x2p2-draft", "1x1-latent", "2x2e4-latent-ragged", "1x2p2-hybrid-ngram")
"""Together they have all that the others have, but for layers of two KV groups."""


# (data x tensor, processes): one rank over both processes, one rank in each, one shard of a rank in each.
CASES = [("1x2", 2), ("2x2", 2), ("2x2", 4), ("2x2e4-mixture", 2), ("2x2e4-latent-ragged", 2), ("2x2-draft", 2)]
# A stage, or two, for each process, and two processes for a stage
CASES += [("1x1p2", 2), ("1x2p2", 4), ("1x1p4-deep", 2), ("2x1p2-ngram", 2), ("2x1p4-deep", 4), ("1x2p2-draft", 2)]
CASES += [("2x2e4p2-ragged", 2), ("2x2-hybrid", 2), ("1x2p2-hybrid-ngram", 2)]
CASES += [("2x2-mean", 2), ("2x1p2-hybrid-last", 2), ("1x2p3-groups-vectors", 3), ("2x1-encoder", 2)]


def _alone(shape: str) -> str:
    """Return the shape of one device that has the same model."""
    if "latent" in shape:
        return "1x1-latent-mtp" if shape.endswith("mtp") else "1x1-latent"
    alone = re.sub("-(ngram|draft)$", "", re.sub("^[^-]*", "1x1", shape))
    return alone.replace("ragged", "mixture").replace("uneven", "deep")


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The results by shape, up to the first shape that failed, and the log."""
    names = [item.name for item in request.session.items if item.path == request.path]
    asked = {shape for shape in SHAPES for name in names if name.endswith(f"[{shape}]")}
    asked |= {shape for shape, nnodes in CASES for name in names if name.endswith(f"[{shape} on {nnodes}]")}
    compared = {_alone(shape) for shape in asked}
    shapes = [shape for shape in SHAPES if shape in asked | compared]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    command = [sys.executable, "-m", "tests.keystone_on_meshes", *shapes]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["shape"]: line for line in lines} | {"log": done.stderr}


@pytest.mark.parametrize("shape", grid(SHAPES, lambda shape: shape in QUICK))
def test_tokens_are_those_of_one_device(shape: str, served: dict[str, Any]) -> None:
    assert shape in served, served["log"][-5000:]
    found = served[shape]
    alone = _alone(shape)
    assert found["tokens"] == served[alone]["tokens"]
    _check_cases(shape, found)
    if shape.endswith("draft"):
        assert found["accepted"] == found["drafted"] > 50, "the model drafts for itself, so it is always right"
    assert found["compiles"] == 0 or shape == alone, "only the naive recompute of a model's first shape may compile"


def _check_cases(shape: str, found: dict[str, Any]) -> None:
    """Check that all that may happen did; in a shape with stages, where requests take turns, some of it is enough."""
    if shape.endswith(("mean", "vectors", "encoder")):
        return  # few requests compete, as pooled ones end at once
    caching = found["hits"], found["loaded"], found["preempted"]
    enough = max(caching) if sizes_of(shape)[3] > 1 else min(caching)
    assert min(found["aborted"], enough) > 0, "a case never occurred"


def _run(model: Path, shape: str, nnodes: int) -> dict[str, Any]:
    data, tensor, _, stages = sizes_of(shape)
    devices = data * tensor * stages // nnodes
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    address = f"127.0.0.1:{host.free_port()}"
    command = [sys.executable, "-m", "tests.keystone_on_processes", str(model), shape, str(nnodes)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), address], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(nnodes)
    ]
    try:
        answers = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * nnodes, [log[-3000:] for _, log in answers]
    found: dict[str, Any] = json.loads(answers[0][0].splitlines()[-1])
    return found


@pytest.mark.grid  # `make test` compares the answers of two processes over HTTP: `e2e/test_processes.py`
@pytest.mark.parametrize(("shape", "nnodes"), CASES, ids=[f"{shape} on {nnodes}" for shape, nnodes in CASES])
def test_processes_give_the_tokens_of_one_device(
    shape: str, nnodes: int, tmp_path: Path, served: dict[str, Any]
) -> None:
    kind = shape.partition("-")[2]
    write_model(tmp_path, MODELS[kind])
    found = _run(tmp_path, shape, nnodes)
    assert found["tokens"] == served[_alone(shape)]["tokens"]
    _check_cases(shape, found)
