"""An accelerator gets its weights after its programs are compiled; a CPU does both at once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.config.schema import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.execution import startup
from jaxserve.runtime.execution.startup import PhaseTimer, fill_devices, naming_the_bundle
from jaxserve.runtime.programs.program_set import ProgramSet
from tests.runtime.tiny import CAPACITY, mesh, specs

CONFIG = EngineConfig(disable_program_cache=True)


def _fill(platform: str, bundle: Any = None, config: EngineConfig = CONFIG) -> PhaseTimer:
    deployment: Any = SimpleNamespace(
        config=config,
        params={},
        state=specs(CAPACITY),
        program_keys=["update"],
        device=SimpleNamespace(platform=platform),
        model=SimpleNamespace(stage=None),
        builder=lambda mesh: None,
    )
    phases, weights = PhaseTimer(), SimpleNamespace()
    fill_devices(deployment, mesh(), [weights], bundle, phases, behind=False)  # type: ignore[arg-type]
    return phases


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which compiling ends and loading begins; compiling waits for a load that has begun."""
    log: list[str] = []
    loading = threading.Event()

    def build(*_: Any, check: Any, **__: Any) -> tuple[ProgramSet, int]:
        loading.wait(0.2)
        check()
        log.append("compiled")
        return ProgramSet({"update": lambda: None}), 1

    def load(*_: Any) -> None:
        log.append("weights")
        loading.set()

    monkeypatch.setattr(startup, "build_programs", build)
    monkeypatch.setattr(startup, "build_params", load)
    return log


def test_weights_wait_for_programs_that_an_accelerator_compiles(log: list[str]) -> None:
    assert set(_fill("gpu").seconds) == {"compile", "weights", "state"}
    assert log == ["compiled", "weights"]


def test_weights_do_not_wait_for_programs_that_are_kept(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "are_kept", lambda *_: True)
    _fill("gpu")
    assert log == ["weights", "compiled"]


def test_a_cpu_compiles_while_weights_are_read(log: list[str]) -> None:
    _fill("cpu")
    assert log == ["weights", "compiled"]


def test_an_error_of_the_weights_ends_the_compiling(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("a tensor holds NaN")

    monkeypatch.setattr(startup, "build_params", fail)
    with pytest.raises(ConfigError, match="holds NaN"):
        _fill("cpu")
    assert not log


@pytest.mark.parametrize(("target", "loads", "order"), [
    ("", True, ["weights"]), ("nvidia-h200", True, ["weights"]), ("nvidia-h200", False, ["compiled", "weights"]),
])  # fmt: skip
def test_a_bundle_for_a_target_that_does_not_load_is_compiled_before_the_weights_are_copied(
    target: str, loads: bool, order: list[str], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "load_bundle", lambda *_: {"update": lambda: None} if loads else None)
    phases = _fill("gpu", SimpleNamespace(target=target), EngineConfig(programs="x", disable_program_cache=True))
    assert log == order
    assert ("compile" in phases.seconds) is not loads


def test_a_bundled_program_that_fails_at_first_is_an_error_with_advice() -> None:
    advice = r"programs=x: a program failed in its first run .*leave --programs out"
    with pytest.raises(ConfigError, match=advice), naming_the_bundle(EngineConfig(programs="x")):
        raise jax.errors.JaxRuntimeError("INTERNAL: no algorithm")
    with pytest.raises(jax.errors.JaxRuntimeError), naming_the_bundle(EngineConfig()):
        raise jax.errors.JaxRuntimeError("INTERNAL: no algorithm")
