"""The fingerprint changes with all that shapes a program: the deployment, the environment and our sources."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import jaxserve
import pallas_kernels
from jaxserve.models.registry import abstract_params
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.step_plan import Capacity
from tests.runtime.tiny import CAPACITY, builder, laid_out, mesh, model, specs


def test_the_fingerprint_follows_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(capacity: Capacity = CAPACITY, **context: Any) -> str:
        made = builder(capacity)
        made.context = dataclasses.replace(made.context, **context)
        return made.fingerprint()

    same = of()
    assert same == of()
    abstract = abstract_params(laid_out(), np.dtype(jnp.bfloat16))
    bfloat16 = ProgramBuilder(builder().context, CAPACITY, mesh(), abstract, specs(CAPACITY)).fingerprint()
    others = [
        of(msgspec.structs.replace(CAPACITY, num_pages=19)),
        of(msgspec.structs.replace(CAPACITY, decode_buckets=(4,))),
        of(sample_rows=None),
        of(model=dataclasses.replace(model(), norm_eps=1e-6)),
        of(model=dataclasses.replace(model(), windows=(8, None))),
        bfloat16,
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    others.append(of())
    monkeypatch.undo()
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    others.append(of())
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("name", "shapes_programs"),
    [
        ("jaxserve/layers/rope.py", True),
        ("jaxserve/models/llama.py", True),
        ("jaxserve/runtime/step/sampling.py", True),
        ("jaxserve/api_types.py", True),
        ("jaxserve/params.py", True),
        ("pallas_kernels/paged_attention/reference.py", True),
        ("jaxserve/server/app.py", False),
        ("jaxserve/engine/scheduling/scheduler.py", False),
    ],
)
def test_the_fingerprint_follows_our_sources(
    name: str, shapes_programs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = builder().fingerprint()
    for package in (jaxserve, pallas_kernels):
        root = Path(str(package.__file__)).parent
        shutil.copytree(root, tmp_path / root.name, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__file__", str(tmp_path / root.name / "__init__.py"))
    assert builder().fingerprint() == before
    with (tmp_path / name).open("a") as file:
        file.write("\n# changed\n")
    assert (builder().fingerprint() != before) == shapes_programs
