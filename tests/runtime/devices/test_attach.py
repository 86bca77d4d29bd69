"""The devices that an engine gets, and the explanations for those it can't use.

jax itself runs in subprocesses, as it looks for devices only once per process; the texts are tested here.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.accelerators import Accelerator
from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices import attach as module
from jaxserve.runtime.devices.attach import attach, explain_missing, explain_obstacle
from tests.machines import write_nvidia_smi

L4 = Accelerator("cuda", "NVIDIA L4 with driver 580.65.06", "cuda13")
OLD = Accelerator("cuda", "Tesla T4 with driver 470.256", problem="the driver is too old: update it")
V100 = Accelerator("cuda", "Tesla V100 with driver 580.65.06", "cuda12")
V5E = Accelerator("tpu", "4 x TPU chip", "tpu")
AMD = Accelerator("rocm", "8 x AMD GPU", problem="jaxserve does not serve AMD's GPUs")


@pytest.mark.parametrize(
    ("platform", "found", "plugins", "words"),
    [
        (
            "cuda",
            [],
            [],
            "no NVIDIA GPU with its driver is found here, nor jax's plug-in for one (pip install 'jaxserve[cuda13]'); "
            "--device auto serves on the best available device",
        ),
        (
            "tpu",
            [L4],
            ["tpu"],
            "no TPU is found here (jax says: it failed); there is NVIDIA L4 with driver 580.65.06; "
            "--device auto serves on the best available device",
        ),
        ("cuda", [AMD], ["cuda13"], "no NVIDIA GPU with its driver is found here (jax says: it failed); there is 8"),
        (
            "cuda",
            [L4],
            [],
            "NVIDIA L4 with driver 580.65.06 can't be used: jax's plug-in for it is not installed; to install cuda13: "
            "`make install` in a checkout, or pip install 'jaxserve[cuda13]'",
        ),
        ("cuda", [OLD], ["cuda13"], "Tesla T4 with driver 470.256 can't be used: the driver is too old: update it"),
        (
            "cuda",
            [V100],
            ["cuda13"],
            "Tesla V100 with driver 580.65.06 can't be used: jax's plug-in cuda13 is installed and fails: it failed; "
            "cuda13 needs driver 580 and compute capability 7.5, or newer; to install cuda12: `make install` in a "
            "checkout, or pip install 'jaxserve[cuda12]'",
        ),
        ("cuda", [L4], ["cuda12"], "NVIDIA L4 with driver 580.65.06 can't be used: jax's plug-in cuda12 is "),
        ("tpu", [V5E], [], "4 x TPU chip can't be used: jax's plug-in for it is not installed; to install tpu: `make"),
        ("METAL", [], [], "it failed"),
    ],
)  # fmt: skip
def test_the_error_names_what_is_missing(
    platform: str, found: list[Accelerator], plugins: list[str], words: str
) -> None:
    said = explain_missing(platform, found, plugins, ["it failed (set JAX_PLATFORMS='' to …)", "Falling back to cpu."])
    assert said.startswith(words)


def test_a_silent_jax_is_explained() -> None:
    """Without a device file jax finds no device and logs nothing, even if `nvidia-smi` lists a GPU."""
    assert explain_obstacle(L4, ["cuda13"], []) == "jax's plug-in cuda13 is installed and fails: jax finds no device"


def test_hidden_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "fails (CUDA_VISIBLE_DEVICES='-1' is set): none" in explain_missing("cuda", [L4], ["cuda13"], ["none"])


def ask(device: str, folder: Path, *, gpu: bool, **environment: str) -> tuple[str, str]:
    """Return the platform that a process gets for `--device`, or its error, and the log."""
    code = (
        "import jaxserve.accelerators as a, os\n"
        "from jaxserve.config.schema import EngineConfig\n"
        "from jaxserve.errors import ConfigError\n"
        "from jaxserve.runtime.devices.attach import attach\n"
        f"try: print(attach(EngineConfig(device={device!r}))[0].platform)\n"
        "except ConfigError as error: print(error)"
    )
    write_nvidia_smi(folder, *(("580.65.06", "NVIDIA L4", "8.9") if gpu else ()))
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    env = os.environ | {"JAX_PLATFORMS": "", "PATH": path} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.skipif(
    bool(module.find_accelerators() or module.installed_extras()),
    reason="this machine has what this test needs missing",
)
@pytest.mark.grid
def test_jax_without_a_plugin(tmp_path: Path) -> None:
    assert ask("auto", tmp_path, gpu=False) == ("cpu", "")
    platform, said = ask("auto", tmp_path, gpu=True)
    assert platform == "cpu"
    assert (
        "NVIDIA L4 with driver 580.65.06 is not used, serving on the CPU: jax's plug-in for it is not installed; "
        in said
    )
    assert "make install" in said
    assert ask("cpu", tmp_path, gpu=True) == ("cpu", "")
    assert ask("auto", tmp_path, gpu=True, JAX_PLATFORMS="cpu") == ("cpu", "")
    words = "NVIDIA L4 with driver 580.65.06 can't be used: jax's plug-in for it is not installed; to install cuda13"
    assert ask("cuda", tmp_path, gpu=True)[0].startswith(f"device=cuda: {words}")
    said, _ = ask("auto", tmp_path, gpu=True, JAX_PLATFORMS="cuda")
    assert said.startswith(f"device=auto with JAX_PLATFORMS=cuda: {words}")


@pytest.mark.slow
def test_jax_with_a_failing_plugin(tmp_path: Path) -> None:
    """A plug-in that is installed next to jax, as NVIDIA's are, and raises when jax calls it."""
    plugins = tmp_path / "plugins"
    (plugins / "jax_cuda13_plugin").mkdir(parents=True)
    (plugins / "jax_plugins/xla_cuda13").mkdir(parents=True)
    (plugins / "jax_plugins/xla_cuda13/__init__.py").write_text(
        "def initialize(): raise RuntimeError('Unable to load cuDNN. Is it installed?')"
    )
    path = os.pathsep.join((str(plugins), os.environ.get("PYTHONPATH", ""), str(Path.cwd())))
    platform, said = ask("auto", tmp_path / "bin", gpu=True, PYTHONPATH=path)
    assert platform == "cpu"
    assert "is not used, serving on the CPU: jax's plug-in cuda13 is installed and fails: " in said
    assert "Unable to load cuDNN" in said
    said, log = ask("cuda", tmp_path / "bin", gpu=True, PYTHONPATH=path)
    assert said.startswith("device=cuda: NVIDIA L4 with driver 580.65.06 can't be used: jax's plug-in cuda13 is inst")
    assert log == ""


class _Jax:
    """Fakes the devices that jax finds: `first`, or those of the CPU once `jax_platforms` is cpu."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: Any) -> None:
        self.first, self.cpu = first, jax.devices()
        self.platforms: str | None = None
        monkeypatch.setattr(jax, "devices", self.devices)
        monkeypatch.setattr(jax.config, "update", self.update)
        monkeypatch.setattr(module, "clear_backends", lambda: None)
        monkeypatch.delenv("JAX_PLATFORMS")

    def update(self, name: str, value: str) -> None:
        assert name == "jax_platforms"
        self.platforms = value

    def devices(self) -> Any:
        if self.platforms == "cpu":
            return self.cpu
        if isinstance(self.first, Exception):
            raise self.first
        return [self.first]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (
            RuntimeError("Unable to initialize backend 'cuda': out of memory"),
            "Unable to initialize backend 'cuda': out",
        ),
        (SimpleNamespace(platform="METAL", device_kind="Metal"), r"no programs for Metal, which jax finds \(METAL\)"),
        (SimpleNamespace(platform="gpu", device_kind="AMD MI300X", compute_capability="gfx942"), "for AMD MI300X"),
    ],
)
def test_an_unusable_device_leaves_the_cpu(
    first: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = _Jax(monkeypatch, first)
    with caplog.at_level(logging.WARNING, logger="jaxserve"):
        assert attach(EngineConfig()) == fake.cpu
    [line] = caplog.messages
    assert line.startswith("serving on the CPU: ")
    assert re.search(reason, line)
    monkeypatch.setattr(module, "installed_extras", lambda: ["cuda13"])
    with pytest.raises(ConfigError, match=f"^device=cuda: no NVIDIA GPU with its driver is found here .*{reason}"):
        attach(EngineConfig(device="cuda"))


def test_several_nodes_without_join_are_refused() -> None:
    with pytest.raises(ConfigError, match="only `jaxserve serve`"):
        attach(EngineConfig(tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:5000"))
