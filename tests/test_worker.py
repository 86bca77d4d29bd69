"""The engine's description of its weights matches the weights it holds."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxserve import worker
from jaxserve.api_types import EngineInfo, KVGroup
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices.device import DeviceFacts
from jaxserve.runtime.execution import deployment_log, startup
from jaxserve.runtime.programs.builder import ProgramBuilder
from jaxserve.runtime.programs.program_set import ProgramSet
from jaxserve.runtime.sizing.deployment import deploy, read_model, read_stored
from pallas_kernels.paged_attention import KernelTarget
from tests.tiny_model import SETTINGS
from tests.weights.conftest import GOLDEN
from tests.weights.gguf_converter import from_golden

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF model whose matrices are Q8_0, except the MLP's down projection: its 48 inputs are no whole blocks."""
    return from_golden("smollm2", tmp_path_factory.mktemp("gguf") / "m.gguf", Kind.Q8_0)


def settings(model: Path, **changes: Any) -> EngineConfig:
    few = {"load_format": "auto", "dtype": "auto", "max_running_requests": 2, "cuda_graph_bs": (2,), "page_size": 8}
    return EngineConfig(**{**SETTINGS, **few, "model": str(model), "disable_program_cache": True, **changes})


def started(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineInfo, int]:
    """Build an engine; return its description and the real size of its parameters in bytes.

    Iterating over its programs would wait for those that are loaded while a server already serves.
    """
    held = []
    monkeypatch.setattr(ProgramSet, "__iter__", lambda self: pytest.fail("it waits for all programs"))
    load = startup._load
    monkeypatch.setattr(startup, "_load", lambda *args: held.append(load(*args)) or held[-1])
    _, info = worker.build_engine(config)
    return info, sum(array.nbytes for array in jax.tree.leaves(held))


@pytest.mark.grid
def test_packed_weights_are_logged_and_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    packed, held = started(settings(model), monkeypatch)
    assert (packed.quantization, packed.weight_bytes) == ("gguf", held)
    said = next(text for text in caplog.messages if text.startswith("weights:"))
    assert said.startswith("weights: gguf, 7 of 9 linear layers in 8 bits (int8, groups of 32) x 7; not quantized: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"dtype": "float32"},
            "weights: gguf, dequantized; not quantized: .*: with dtype=float32 weights are deq",
        ),
        (
            {"quantization": "none"},
            "weights: gguf, dequantized; not quantized: .*: --quantization none; .*: stored as",
        ),
    ],
)
def test_the_reason_for_dequantized_weights_is_logged(
    changes: dict[str, Any], said: str, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    config = settings(model, **changes)
    parsed = read_model(config)
    device = DeviceFacts(KernelTarget("cpu"), 2**34)
    deployment_log.log_weights(deploy(config, parsed, device, stored=read_stored(config, parsed)))
    [text] = caplog.messages
    assert re.match(said, text)


def test_layers_with_windows_are_logged_and_described(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    config = settings(GOLDEN / "gemma3", dtype="float32", page_size=16, dp_size=2, max_total_tokens=96)
    device = DeviceFacts(KernelTarget("cpu"), 2**34, max_devices=2)
    groups = worker._kv_groups(deploy(config, read_model(config), device))
    # Of each 96 tokens, the window of 16 gets a page, two that it begins and ends within, and one for a chunk of 16.
    assert groups == (KVGroup(1, 12), KVGroup(2, 8, 16))
    deployment_log.log_kv_groups(groups, 16)
    assert caplog.messages == ["KV groups: 1 layer full, 192 tokens; 2 layers with a window of 16, 128 tokens"]
    deployment_log.log_kv_groups(groups[:1], 16)
    assert len(caplog.messages) == 1


def test_the_log_names_the_devices_of_a_mesh() -> None:
    device, model = (
        DeviceFacts(KernelTarget("cpu"), 2**34, max_devices=4),
        read_model(EngineConfig(model=str(GOLDEN / "gemma3"))),
    )
    sizes = ({}, {"dp_size": 2}, {"dp_size": 2, "pp_size": 2})
    configs = [settings(GOLDEN / "gemma3", dtype="float32", max_total_tokens=96, **some) for some in sizes]
    assert [worker._mesh_prefix(deploy(config, model, device)) for config in configs] == [
        "",
        "2 (data parallel 2 x tensor parallel 1) x ",
        "4 (pipeline parallel 2 x data parallel 2 x tensor parallel 1) x ",
    ]


def test_unsupported_packed_weights_are_refused_before_anything_is_compiled(model: Path) -> None:
    for config in (
        settings(model, quantization="gguf", dtype="float32"),
        settings(GOLDEN / "smollm2", quantization="gguf"),
        settings(model, quantization="gguf", load_format="dummy"),
    ):
        with pytest.raises(ConfigError, match="quantization=gguf: "):
            worker.build_engine(config)


def test_a_weight_error_is_raised_before_all_programs_are_compiled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def fail(*_: Any) -> None:
        raise ConfigError("a tensor holds NaN")

    monkeypatch.setattr(startup, "_load", fail)
    monkeypatch.setattr(ProgramBuilder, "compile", lambda self, key: compiled.append(key) or time.sleep(0.2))
    with pytest.raises(ConfigError, match="holds NaN"):
        worker.build_engine(settings(model))
    assert len(compiled) <= 2  # one per core, started before the error
