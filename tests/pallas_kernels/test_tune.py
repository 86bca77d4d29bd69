"""Tuning: a dry run writes a table; block sizes come from the caller, else from the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import tuning as expert_tuning
from pallas_kernels.paged_attention import KernelTarget, Problem, tuning
from pallas_kernels.paged_attention.tuning import tuned_blocks
from pallas_kernels.quantized_matmul import Scheme
from pallas_kernels.quantized_matmul import tuning as product_tuning
from pallas_kernels.tune import __main__ as tune
from pallas_kernels.tune.attention import tiny_problems
from pallas_kernels.tune.task import Task
from pallas_kernels.tuning import read_entries, write_entries

BF16 = np.dtype(jnp.bfloat16)
LLAMA = Problem(32, 8, 128, 16, BF16, BF16)
H200 = KernelTarget("cuda", "NVIDIA H200", (9, 0))


@pytest.mark.grid
@pytest.mark.interpreted
def test_a_dry_run_writes_a_table(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    assert tune.main(["--interpret-tiny", "--output", str(path)]) == 0
    entries = read_entries(path)
    assert [(entry["backend"], entry["kind"]) for entry in entries] == [("triton", "decode"), ("triton", "prefill")]
    assert all(entry["problem"] == tuning.facts(tiny_problems()[0]) for entry in entries)
    assert set(entries[1]["blocks"]) == {"block_q", "block_kv", "num_warps", "num_stages"}


@pytest.mark.grid
@pytest.mark.interpreted
def test_a_dry_run_of_products_writes_what_their_kernel_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nvidia-h200.json"
    assert tune.main(["--kernel", "products", "--interpret-tiny", "--output", str(path)]) == 0
    monkeypatch.setattr(product_tuning, "TABLES", tmp_path)
    scheme = Scheme("int4", 128, zeros=True)
    for rows, sizes in ((1, {"block_out"}), (2048, {"block_out", "block_rows"})):
        found = product_tuning.tuned_blocks(H200, "triton", rows, 128, 256, scheme)
        assert found is not None
        assert set(found) == sizes | {"num_warps", "num_stages"}


@pytest.mark.grid
@pytest.mark.interpreted
def test_a_dry_run_of_experts_writes_what_their_kernel_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nvidia-h200.json"
    assert tune.main(["--kernel", "experts", "--interpret-tiny", "--output", str(path)]) == 0
    monkeypatch.setattr(expert_tuning, "TABLES", tmp_path)
    scheme = Scheme("int4", 128)
    up, down = expert_tuning.Experts(4, 256, 256, True, scheme), expert_tuning.Experts(4, 256, 128, False, scheme)
    for experts, rows, sizes in ((up, 1, {"block_out"}), (down, 2048, {"block_out", "block_rows"})):
        found = expert_tuning.tuned_blocks(H200, "triton", rows, experts)
        assert found is not None
        assert set(found) == sizes | {"num_warps", "num_stages"}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an accelerator is attached")
def test_without_an_accelerator_it_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 1
    assert "no accelerator is attached" in capsys.readouterr().err


def test_a_dry_run_needs_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--interpret-tiny"])
    assert "--interpret-tiny needs --output" in capsys.readouterr().err


def test_the_callers_sizes_precede_the_tables_and_those_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    decode = Task("decode", tuning.facts(LLAMA), None, [], lambda _: 0.0)
    entries = tune.merged([], "triton", decode, {"block_kv": 64})
    entries = tune.merged(entries, "mosaic_gpu", decode, {"block_kv": 99})
    entries = tune.merged(entries, "triton", decode, {"block_kv": 128})
    assert len(entries) == 2
    write_entries(tmp_path / "nvidia-h200.json", entries)

    assert tuned_blocks(H200, "triton", "decode", LLAMA) == {"block_kv": 128}
    assert tuned_blocks(H200, "triton", "decode", dataclasses.replace(LLAMA, heads=64, kv_heads=16)) is not None
    assert tuned_blocks(H200, "triton", "decode", dataclasses.replace(LLAMA, heads=64)) is None
    assert tuned_blocks(H200, "triton", "prefill", LLAMA) is None
    assert tuned_blocks(dataclasses.replace(H200, kind="NVIDIA H100 80GB HBM3"), "triton", "decode", LLAMA) is None

    asked = dataclasses.replace(H200, blocks=frozenset({("decode", "block_kv", 32)}))
    assert tuned_blocks(asked, "triton", "decode", LLAMA) == {"block_kv": 32}
    assert tuned_blocks(asked, "triton", "prefill", LLAMA) is None
